"""Kernels that TensorRT-RTX compiles when an engine is opened, kept for the next time."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import Any

from dflash_runtime.bundle import cache_root, write_atomically

_DIGEST_BYTES = 32


class KernelCache:
    """One runtime cache for all engines of a folder, filled from a file and saved when the device closes.

    The file is the sha256 of the rest, and what TensorRT gave. A damaged file, or one that TensorRT takes for that of
    another GPU, driver or version, is ignored with a warning, and replaced.

    Args:
        cache: TensorRT's own object.
        engines: Folder of the engines; it names backend and GPU.
        version: TensorRT's.
    """

    def __init__(self, cache: Any, engines: Path, version: str | None) -> None:
        self.cache, self._loaded = cache, b""
        self.path = cache_root() / "compiled-kernels" / f"{engines.name}-{version}.cache"
        try:
            data = self.path.read_bytes()
        except OSError:
            return  # the first time here
        digest, blob = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        whole = hashlib.sha256(blob).digest() == digest
        if whole and cache.deserialize(blob):
            self._loaded = digest
        else:
            fault = "of another GPU, driver or TensorRT" if whole else "damaged"
            warnings.warn(f"{self.path} is {fault} and ignored; kernels are compiled anew.", stacklevel=2)

    def save(self) -> None:
        """Writes the file if there is something new; a folder that cannot be written costs compiling again."""
        blob = bytes(self.cache.serialize())
        digest = hashlib.sha256(blob).digest()
        if digest == self._loaded:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, digest + blob)
        except OSError as error:
            warnings.warn(f"Compiled kernels are not kept: {error}", stacklevel=2)

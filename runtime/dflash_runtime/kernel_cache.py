"""Kernels that TensorRT-RTX compiles when an engine is opened, kept for the next time."""

from __future__ import annotations

import hashlib
import os
import warnings
from pathlib import Path
from typing import Any

from dflash_runtime.bundle import cache_root

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
        if hashlib.sha256(blob).digest() != digest:
            warnings.warn(f"{self.path} is damaged and ignored; kernels are compiled anew.", stacklevel=2)
        elif not cache.deserialize(blob):
            warnings.warn(f"{self.path} is of another GPU, driver or TensorRT and ignored; kernels are compiled anew.",
                          stacklevel=2)  # fmt: skip
        else:
            self._loaded = digest

    def save(self) -> None:
        """Writes the file if there is something new; a folder that cannot be written costs compiling again."""
        blob = bytes(self.cache.serialize())
        digest = hashlib.sha256(blob).digest()
        if digest == self._loaded:
            return
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(digest + blob)
            temporary.replace(self.path)
        except OSError as error:
            warnings.warn(f"Compiled kernels are not kept: {error}", stacklevel=2)

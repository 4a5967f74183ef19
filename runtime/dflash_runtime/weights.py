"""Weights by their name in the manifest, mapped from their files; nothing is copied where it need not be."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_runtime.bundle import Bundle
from dflash_runtime.errors import BundleError

SIGNED_TRANSPOSED, FLOAT8_TRANSPOSED = "I8T", "F8T"
"""What an engine may want as [in, out]: of a U8 weight [out, in] signed bytes, value - 128; of e4m3 floats the same."""
# BF16 has no NumPy type: its bits are the upper half of a float32.
STORED: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


class MappedWeights:
    """The weight files of a bundle in memory: one mapping per file, whoever reads it."""

    def __init__(self, bundle: Bundle) -> None:
        self._entries = bundle.manifest.weights
        self._files: dict[str, mmap.mmap] = {}
        for name in sorted({entry.file for entry in self._entries.values()}):
            with bundle.file(name).open("rb") as stream:
                self._files[name] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)

    def float32(self, name: str) -> npt.NDArray[Any]:
        """The weight in float32, exactly: a read-only view where it is stored so, else a widened copy.

        Raises:
            BundleError: no such weight, or a dtype that is not a floating-point one.
        """
        entry = self._entries.get(name)
        if entry is None or entry.dtype not in STORED:
            what = "is not in the bundle" if entry is None else f"has dtype {entry.dtype}"
            raise BundleError(f"Weight {name!r} {what}. Copy or build the bundle again.")
        count = int(np.prod(entry.shape, dtype=np.int64))
        stored = np.frombuffer(self._files[entry.file], STORED[entry.dtype], count, entry.offset_bytes)
        return widened(stored, entry.dtype).reshape(entry.shape)

    def drop_pages(self) -> None:
        """Gives back the memory of what has been read so far; it is read again where it is needed."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for file in self._files.values():
                file.madvise(mmap.MADV_DONTNEED)


def widened(stored: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Values as they are stored in float32, exactly; the same array where they are float32."""
    if dtype == "BF16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return stored.astype(np.float32, copy=False)

"""Weights read by their entry in the manifest, without copying where the dtype allows it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_runtime.bundle import Bundle
from dflash_runtime.errors import BundleError

# BF16 has no NumPy type: its bits are the upper half of a float32.
_STORED = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I64": np.int64, "BOOL": np.bool_}


def map_weight(bundle: Bundle, name: str) -> npt.NDArray[Any]:
    """The weight `name` as a read-only view of its file; BF16 comes as its raw uint16 bits.

    Raises:
        BundleError: no such weight, an unknown dtype, or sizes that contradict each other.
    """
    entry = bundle.manifest.weights.get(name)
    if entry is None:
        raise BundleError(f"{bundle.path} has no weight {name!r}. Copy or build the bundle again.")
    if entry.dtype not in _STORED:
        raise BundleError(f"Weight {name!r} has dtype {entry.dtype}; known are {', '.join(_STORED)}.")
    dtype = np.dtype(_STORED[entry.dtype])
    expected = int(np.prod(entry.shape, dtype=np.int64)) * dtype.itemsize
    if entry.length_bytes != expected:
        raise BundleError(f"Weight {name!r} has {entry.length_bytes} bytes, {entry.shape} needs {expected}.")
    # bytes first: a weight may start at an offset that is no multiple of its item size
    raw = np.memmap(bundle.file(entry.file), np.uint8, "r", entry.offset_bytes, (entry.length_bytes,))
    return raw.view(dtype).reshape(entry.shape)


def weight_as_float32(bundle: Bundle, name: str) -> npt.NDArray[np.float32]:
    """The weight `name` in float32: exact for every stored dtype."""
    stored = map_weight(bundle, name)
    if bundle.manifest.weights[name].dtype == "BF16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return stored.astype(np.float32)

"""Weights on the device: each once for every type an engine wants it in, converted on the way, piece by piece."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from dflash_runtime.bundle import Bundle
from dflash_runtime.device import Array, Buffer, Device, aligned
from dflash_runtime.device_engine import BoundWeight
from dflash_runtime.errors import EngineError
from dflash_runtime.weights import FLOAT8_TRANSPOSED, SIGNED_TRANSPOSED, STORED, widened

_STAGING_BYTES = 16 << 20
# What a turned weight is stored as, and the bits that are flipped on the way.
_TURNED = {SIGNED_TRANSPOSED: ("U8", 0x80), FLOAT8_TRANSPOSED: ("F8_E4M3", 0)}

WeightPlaces = dict[tuple[str, str], Buffer]
"""(weight, dtype) -> where it lies."""
WeightSource = Callable[[Device, Bundle, Iterable[BoundWeight]], WeightPlaces]


def upload_weights(device: Device, bundle: Bundle, wanted: Iterable[BoundWeight]) -> WeightPlaces:
    """Brings weights onto the device; the host never holds more than a piece.

    Returns:
        (weight, dtype) -> where it lies; inputs that want the same weight in the same type share it.

    Raises:
        EngineError: the bundle lacks a weight, or its values do not fit the type wanted.
        BackendError: the device has too little memory.
    """
    entries, sizes, places = bundle.manifest.weights, dict[tuple[str, str], int](), WeightPlaces()
    for bound in wanted:
        entry = entries.get(bound.weight)
        turned = bound.dtype in _TURNED and entry is not None and entry.dtype == _TURNED[bound.dtype][0]
        if entry is None or not (turned or (entry.dtype in STORED and bound.dtype in STORED)):
            has = "the bundle has no such weight" if entry is None else f"the bundle has it as {entry.dtype}"
            raise EngineError(f"The engines want weight {bound.weight!r} as {bound.dtype}; {has}. Build them again.")
        item_bytes = 1 if turned else np.dtype(STORED[bound.dtype]).itemsize
        sizes[bound.weight, bound.dtype] = math.prod(entry.shape) * item_bytes
    if sizes:
        address = device.allocate(sum(map(aligned, sizes.values()))).address
        staging = device.host_memory(_STAGING_BYTES)
    for (name, dtype), size in sizes.items():
        pieces = _turned if dtype in _TURNED else _converted
        places[name, dtype] = Buffer(address, size)
        for piece in pieces(bundle, name, dtype, staging):
            device.upload(address, piece)
            device.mark()
            device.wait()  # the staging memory is used again
            address += piece.nbytes
        address = places[name, dtype].address + aligned(size)
    return places


def _converted(bundle: Bundle, name: str, dtype: str, staging: Array) -> Iterator[Array]:
    """A float weight in another type, piece by piece."""
    entry, target = bundle.manifest.weights[name], np.dtype(STORED[dtype])
    left, at_once = math.prod(entry.shape), staging.nbytes // 4
    with bundle.file(entry.file).open("rb") as stream:
        stream.seek(entry.offset_bytes)
        while left:
            stored = np.fromfile(stream, STORED[entry.dtype], min(left, at_once))
            piece = staging[: stored.size * target.itemsize]
            same = entry.dtype == dtype
            piece.view(target)[:] = stored if same else narrowed(widened(stored, entry.dtype), dtype, name)
            yield piece
            left -= stored.size


def _turned(bundle: Bundle, name: str, dtype: str, staging: Array) -> Iterator[Array]:
    """Bytes of a weight [out, in] as [in, out], some of its columns at a time."""
    entry = bundle.manifest.weights[name]
    rows, columns = entry.shape
    stored = np.memmap(bundle.file(entry.file), np.uint8, "r", entry.offset_bytes, (rows, columns))
    at_once = max(1, staging.nbytes // rows)
    for first in range(0, columns, at_once):
        part = stored[:, first : first + at_once].T
        np.bitwise_xor(part, np.uint8(_TURNED[dtype][1]), out=staging[: part.size].reshape(part.shape))
        yield staging[: part.size]


def narrowed(wide: Array, dtype: str, name: str) -> Array:
    """Float32 values as a dtype in safetensors' spelling, rounded to the nearest, ties to even, as PyTorch does.

    Raises:
        EngineError: finite values of the weight `name` that fp16 cannot hold.
    """
    if dtype == "F32":
        return wide
    if dtype == "BF16":
        bits = np.ascontiguousarray(wide).view(np.uint32)
        rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
        return np.where(np.isnan(wide), np.uint16(0x7FC0), rounded)
    with np.errstate(over="ignore"):
        half = wide.astype(np.float16)
    if not np.array_equal(np.isfinite(half), np.isfinite(wide)):
        largest = float(np.abs(wide).max())
        raise EngineError(
            f"Weight {name!r} holds {largest:.4g}; fp16 ends at 65504. Build the engines with --precision bf16."
        )
    return half

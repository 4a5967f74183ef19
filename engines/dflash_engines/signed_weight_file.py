"""Writes the file of int4 weights that a TensorRT engine embeds, piece by piece from the bundle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from dflash_engines.passes.signed_weights import OffsetPart, SignedPart
from dflash_runtime.bundle import Bundle, WeightEntry
from dflash_runtime.device import Array
from dflash_runtime.device_weights import narrowed
from dflash_runtime.weights import STORED, widened

_PIECE_BYTES = 1 << 24
"""Of a matrix with one value in a byte: large, because every piece reads across all rows of the stored matrix."""


def write_signed_weights(bundle: Bundle, parts: Sequence[SignedPart], target: Path) -> None:
    """Writes values [in, out] less the middle of their range, scales [groups, out] as the engine has them, and offsets.

    Args:
        bundle: Holds the weights as [out, in] and [out, groups].
        parts: What goes where.
        target: The file.
    """
    with target.open("wb") as stream:
        for part in parts:
            stream.seek(part.offset_bytes)
            for piece in _converted(bundle, part):
                stream.write(piece.tobytes())


def _converted(bundle: Bundle, part: SignedPart) -> Iterator[Array]:
    entry = bundle.manifest.weights[part.weight]
    if isinstance(part, OffsetPart):
        yield from _offsets(bundle, part)
    elif part.dtype == "I4":
        yield from _turned_values(bundle, entry)
    else:
        stored = np.fromfile(bundle.file(entry.file), np.uint8, entry.length_bytes, offset=entry.offset_bytes)
        yield _in_half(stored, entry.dtype, part.dtype, part.weight).reshape(entry.shape).T


def _turned_values(bundle: Bundle, entry: WeightEntry) -> Iterator[Array]:
    """Bytes of two signed values each; an even number of inputs at a time, so that pieces end with a byte."""
    rows, columns = entry.shape
    stored = np.memmap(bundle.file(entry.file), np.uint8, "r", entry.offset_bytes, (rows, columns // 2))
    at_once = max(1, _PIECE_BYTES // (2 * rows))
    for first in range(0, columns // 2, at_once):
        pairs = np.ascontiguousarray(stored[:, first : first + at_once].T)  # a byte holds the values of two inputs
        values = np.empty((2 * len(pairs), rows), np.uint8)
        np.bitwise_and(pairs, np.uint8(15), out=values[0::2])
        np.right_shift(pairs, np.uint8(4), out=values[1::2])
        two = values.reshape(-1).view("<u2")
        packed = (two & np.uint16(15)) | ((two >> np.uint16(4)) & np.uint16(0xF0))
        yield packed.astype(np.uint8) ^ np.uint8(0x88)  # q - 8 in two's complement is q with its highest bit turned


def _offsets(bundle: Bundle, part: OffsetPart) -> Iterator[Array]:
    """(middle - zero point) * scale in fp32, where it has no error: a few bits times half precision."""
    scales, points = bundle.manifest.weights[part.weight], bundle.manifest.weights[part.zero_points]
    per_byte = 2 if points.dtype == "U4" else 1
    count = _PIECE_BYTES // STORED[scales.dtype]().itemsize // per_byte
    for stored, packed in zip(_pieces(bundle, scales), _pieces(bundle, points, count), strict=True):
        half = _in_half(stored, scales.dtype, part.scale_dtype, part.weight)
        wide = widened(half, part.scale_dtype)
        zeros = packed if per_byte == 1 else np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1)[: wide.size]
        yield (part.middle - zeros.astype(np.float32)) * wide


def _in_half(stored: Array, kind: str, wanted: str, name: str) -> Array:
    """Bytes of floats as an array of F16, or of BF16's bits."""
    values = stored.view(STORED[kind])
    return values if kind == wanted else narrowed(widened(values, kind), wanted, name)


def _pieces(bundle: Bundle, entry: WeightEntry, piece_bytes: int = _PIECE_BYTES) -> Iterator[Array]:
    with bundle.file(entry.file).open("rb") as stream:
        stream.seek(entry.offset_bytes)
        left = entry.length_bytes
        while left:
            piece = np.fromfile(stream, np.uint8, min(left, piece_bytes))
            left -= piece.size
            yield piece

"""Writes the file of int4 weights that a TensorRT engine embeds, piece by piece from the bundle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from dflash_engines.passes.signed_weights import SignedPart
from dflash_runtime.bundle import Bundle, WeightEntry
from dflash_runtime.device import Array
from dflash_runtime.device_weights import narrowed
from dflash_runtime.weights import STORED, widened

_PIECE_BYTES = 1 << 24
"""Of a matrix with one value in a byte: large, because every piece reads across all rows of the stored matrix."""


def write_signed_weights(bundle: Bundle, parts: Sequence[SignedPart], target: Path) -> None:
    """Writes values [in, out] without their zero point of 8, and scales [groups, out] in the engine's precision.

    Args:
        bundle: Holds the weights as [out, in] and [out, groups].
        parts: What goes where.
        target: The file.
    """
    with target.open("wb") as stream:
        for part in parts:
            stream.seek(part.offset_bytes)
            entry = bundle.manifest.weights[part.weight]
            for piece in _turned_values(bundle, entry) if part.dtype == "I4" else [_turned_scales(bundle, entry, part)]:
                stream.write(piece.tobytes())


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


def _turned_scales(bundle: Bundle, entry: WeightEntry, part: SignedPart) -> Array:
    count = entry.shape[0] * entry.shape[1]
    stored = np.fromfile(bundle.file(entry.file), STORED[entry.dtype], count, offset=entry.offset_bytes)
    same = entry.dtype == part.dtype
    values = stored if same else narrowed(widened(stored, entry.dtype), part.dtype, part.weight)
    return values.reshape(entry.shape).T

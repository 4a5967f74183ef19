"""Writes the file of int4 weights that a TensorRT engine embeds, piece by piece from the bundle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_engines.passes.signed_weights import OffsetPart, SignedPart
from dflash_runtime.bundle import Bundle, WeightEntry
from dflash_runtime.device_weights import narrowed
from dflash_runtime.weights import STORED, widened

_PIECE_BYTES = 1 << 22


def write_signed_weights(bundle: Bundle, parts: Sequence[SignedPart], target: Path) -> None:
    """Writes values less the middle of their range, scales in the engine's precision, and what zero points add.

    Args:
        bundle: Holds the weights.
        parts: What goes where.
        target: The file.
    """
    with target.open("wb") as stream:
        for part in parts:
            stream.seek(part.offset_bytes)
            for piece in _converted(bundle, part):
                stream.write(piece.tobytes())


def _converted(bundle: Bundle, part: SignedPart) -> Iterator[npt.NDArray[Any]]:
    entry = bundle.manifest.weights[part.weight]
    if isinstance(part, OffsetPart):
        yield from _offsets(bundle, part)
    elif part.dtype == "I4":
        for stored in _pieces(bundle, entry):
            yield stored ^ np.uint8(0x88)  # q - 8 in two's complement is q with its highest bit turned
    else:
        for stored in _pieces(bundle, entry):
            yield _in_half(stored, entry.dtype, part.dtype, part.weight)


def _offsets(bundle: Bundle, part: OffsetPart) -> Iterator[npt.NDArray[Any]]:
    """(middle - zero point) * scale in fp32, where it has no error: a few bits times half precision."""
    scales, points = bundle.manifest.weights[part.weight], bundle.manifest.weights[part.zero_points]
    per_byte = 2 if points.dtype == "U4" else 1
    count = _PIECE_BYTES // STORED[scales.dtype]().itemsize // per_byte
    for stored, packed in zip(_pieces(bundle, scales), _pieces(bundle, points, count), strict=True):
        half = _in_half(stored, scales.dtype, part.scale_dtype, part.weight)
        wide = widened(half, part.scale_dtype)
        zeros = packed if per_byte == 1 else np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1)[: wide.size]
        yield (part.middle - zeros.astype(np.float32)) * wide


def _in_half(stored: npt.NDArray[Any], kind: str, wanted: str, name: str) -> npt.NDArray[Any]:
    """Bytes of floats as an array of F16, or of BF16's bits."""
    values = stored.view(STORED[kind])
    return values if kind == wanted else narrowed(widened(values, kind), wanted, name)


def _pieces(bundle: Bundle, entry: WeightEntry, piece_bytes: int = _PIECE_BYTES) -> Iterator[npt.NDArray[Any]]:
    with bundle.file(entry.file).open("rb") as stream:
        stream.seek(entry.offset_bytes)
        left = entry.length_bytes
        while left:
            piece = np.fromfile(stream, np.uint8, min(left, piece_bytes))
            left -= piece.size
            yield piece

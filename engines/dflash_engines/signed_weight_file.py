"""Writes the file of int4 weights that a TensorRT engine embeds, piece by piece from the bundle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_engines.passes.signed_weights import SignedPart
from dflash_runtime.bundle import Bundle, WeightEntry
from dflash_runtime.device_weights import narrowed
from dflash_runtime.weights import STORED

_PIECE_BYTES = 1 << 22


def write_signed_weights(bundle: Bundle, parts: Sequence[SignedPart], target: Path) -> None:
    """Writes values with their zero point of 8 taken away, and scales in the engine's precision.

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
    for stored in _pieces(bundle, entry):
        if part.dtype == "I4":
            yield stored ^ np.uint8(0x88)  # q - 8 in two's complement is q with its highest bit turned
            continue
        values = stored.view(STORED[entry.dtype])
        wide = (values.astype(np.uint32) << 16).view(np.float32) if entry.dtype == "BF16" else values
        yield values if entry.dtype == part.dtype else narrowed(wide.astype(np.float32), part.dtype, part.weight)


def _pieces(bundle: Bundle, entry: WeightEntry) -> Iterator[npt.NDArray[Any]]:
    with bundle.file(entry.file).open("rb") as stream:
        stream.seek(entry.offset_bytes)
        left = entry.length_bytes
        while left:
            piece = np.fromfile(stream, np.uint8, min(left, _PIECE_BYTES))
            left -= piece.size
            yield piece

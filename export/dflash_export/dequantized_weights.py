"""Quantised weights of a bundle as floats again, and how far they are from what they were rounded from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dflash_export.piece_threads import map_pieces
from dflash_export.quantized_places import ROUND_TO_NEAREST, float_rows
from dflash_export.tensor_files import FLOAT8, TensorPlace, stored_bytes
from dflash_export.weight_values import read_weight
from dflash_runtime.bundle import CheckRow, Manifest, QuantizedWeight, WeightEntry

Array = npt.NDArray[Any]
_PIECE_BYTES = 1 << 22
_MOST_STEPS = {**{f"int{bits}": 1 + 2.0 ** (bits - 9) for bits in (4, 8)}, "fp8": 0.5 + 2.0**-10}
"""How many steps of its scale a rounded weight may be off: half a one, a whole one at the end of the range that a
symmetric weight has one value less at, and there what rounding the scale to bf16 adds. Floats have steps of their own,
an eighth of the power of two below them, and are half a one off."""


def read_float_weight(root: Path, manifest: Manifest, name: str, rows: slice | None = None) -> Tensor:
    """One weight of a bundle: in its stored dtype, or (value - zero point) * scale in fp32 where it is quantised.

    Args:
        root: The bundle.
        manifest: Its manifest.
        name: In the weight index.
        rows: Some of its rows; None for all.
    """
    facts = manifest.quantized.get(name)
    entry = manifest.weights[name]
    if facts is None:
        return read_weight(root, entry)[rows or slice(None)]
    start, stop, _ = (rows or slice(None)).indices(entry.shape[0])
    zero_points = None
    if facts.zero_points is not None:
        zero_points = read_integers(root, manifest.weights[facts.zero_points])[start:stop]
    scales = read_weight(root, manifest.weights[facts.scales])[start:stop]
    return scaled(read_integers(root, entry, start, stop), entry.dtype, scales, zero_points, facts)


def scaled(values: Array, dtype: str, scales: Tensor, zero_points: Array | None, facts: QuantizedWeight) -> Tensor:
    """A quantised weight in fp32, by its values as `unpacked` gives them and their dtype in the index."""
    scales = scales.float()
    if dtype == FLOAT8:
        return torch.from_numpy(values).view(torch.float8_e4m3fn).float() * scales[:, None]
    return torch.from_numpy(dequantize(values, scales.numpy(), zero_points, facts))


def read_float_rows(root: Path, manifest: Manifest, name: str, rows: Sequence[int] | None) -> Tensor:
    """Chosen rows of a weight, ascending, as `read_float_weight` gives them; None for all."""
    if rows is None:
        return read_float_weight(root, manifest, name)
    starts = [i for i, row in enumerate(rows) if i == 0 or row != rows[i - 1] + 1]
    runs = [slice(rows[a], rows[b - 1] + 1) for a, b in zip(starts, [*starts[1:], len(rows)], strict=True)]
    return torch.cat([read_float_weight(root, manifest, name, run) for run in runs])


def read_integers(root: Path, entry: WeightEntry, start: int = 0, stop: int | None = None) -> Array:
    """Values or zero points of the rows from `start` to `stop`, one in a byte."""
    whole = start == 0 and stop in (None, entry.shape[0])
    shape = entry.shape if whole else [(stop or entry.shape[0]) - start, *entry.shape[1:]]
    skipped = 0 if whole else stored_bytes([start, *entry.shape[1:]], entry.dtype)
    count = stored_bytes(shape, entry.dtype)
    stored = np.fromfile(root / entry.file, np.uint8, count, offset=entry.offset_bytes + skipped)
    return unpacked(stored, WeightEntry(entry.file, 0, count, entry.dtype, shape))


@dataclasses.dataclass(frozen=True)
class DequantizedPlace(TensorPlace):
    """A quantised weight of a bundle as a tensor of fp32 values, computed a few rows at a time."""

    root: Path
    manifest: Manifest
    name: str
    first: int
    """Its first row in the weight."""

    def chunks(self, chunk_bytes: int = _PIECE_BYTES) -> Iterator[bytes]:
        """The values' bytes in pieces of whole rows."""
        at_once = max(1, chunk_bytes // (4 * self.shape[1]))
        last = self.first + self.shape[0]
        for start in range(self.first, last, at_once):
            rows = slice(start, min(start + at_once, last))
            yield read_float_weight(self.root, self.manifest, self.name, rows).numpy().tobytes()

    def rows(self, start: int, stop: int) -> DequantizedPlace:
        """Some rows of the tensor, as a tensor of their own."""
        count, columns = stop - start, self.shape[1]
        return dataclasses.replace(
            self, first=self.first + start, shape=(count, columns), length_bytes=4 * count * columns
        )


def dequantized_places(root: Path, manifest: Manifest) -> dict[str, TensorPlace]:
    """The quantised weights of a bundle as places of fp32 values, by name."""
    found: dict[str, TensorPlace] = {}
    for name in manifest.quantized:
        entry = manifest.weights[name]
        file, size, shape = root / entry.file, 4 * math.prod(entry.shape), tuple(entry.shape)
        found[name] = DequantizedPlace(file, entry.offset_bytes, size, "F32", shape, root, manifest, name, 0)
    return found


def put_all_weights(module: nn.Module, root: Path, manifest: Manifest) -> None:
    """Gives the target's module all its weights from the bundle: its checkpoint is one Transformers may not load."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(read_float_weight(root, manifest, name))


def put_dequantized(module: nn.Module, root: Path, manifest: Manifest, dtype: torch.dtype) -> None:
    """Gives the target's module the values its quantised weights have, rounded to `dtype`."""
    with torch.no_grad():
        for name in manifest.quantized:
            parameter = dict(module.named_parameters()).get(name) if not name.startswith("drafter.") else None
            if parameter is not None:
                parameter.copy_(read_float_weight(root, manifest, name).to(dtype))


def check_rounding(root: Path, manifest: Manifest, places: Mapping[str, TensorPlace], covered: str) -> list[CheckRow]:
    """Compares quantised weights with the checkpoint, in steps of their scale, some rows at a time.

    Args:
        root: The bundle.
        manifest: Its manifest.
        places: Bundle name -> float tensor of the checkpoint.
        covered: What the weights belong to, in words.

    Returns:
        A row for each number of bits; none where nothing was rounded here.
    """
    worst: dict[str, float] = {}
    rounded = {
        name: facts
        for name, facts in manifest.quantized.items()
        if name in places and facts.origin == ROUND_TO_NEAREST
    }
    for name in rounded:
        worst_of = partial(_worst_steps, root, manifest, name)
        kind = _kind(manifest, name)
        for steps in map_pieces(worst_of, _numbered(float_rows(places[name]))):
            worst[kind] = max(worst.get(kind, 0.0), steps)
    table = []
    for kind, most in worst.items():
        count = sum(_kind(manifest, name) == kind for name in rounded)
        words = f"{count} matrices of the {covered}, in steps of their {'values' if kind == 'fp8' else 'scale'}"
        allowed = _MOST_STEPS[kind]
        table.append(CheckRow("quantised", f"{covered} {kind}", most, allowed, most <= allowed, words))
    return table


def _kind(manifest: Manifest, name: str) -> str:
    return "fp8" if manifest.weights[name].dtype == FLOAT8 else f"int{manifest.quantized[name].bits}"


def _worst_steps(root: Path, manifest: Manifest, name: str, numbered: tuple[int, Tensor]) -> float:
    """Most steps of its scale that a value of some rows is off."""
    first, rows = numbered
    part = slice(first, first + len(rows))
    stored = manifest.weights[manifest.quantized[name].scales]
    scales = read_weight(root, stored)[part].float().reshape(len(rows), -1, 1)
    found = read_float_weight(root, manifest, name, part)
    apart = (found - rows.float()).abs().reshape(len(rows), scales.shape[1], -1)
    steps = scales.abs().clamp(min=torch.finfo(torch.float32).tiny)
    if manifest.weights[name].dtype == FLOAT8:
        powers = torch.frexp(rows.float().reshape(apart.shape) / steps)[1] - 1
        steps = steps * torch.exp2(powers.clamp(min=-6) - 3.0)
    return float((apart / steps).max())


def _numbered(pieces: Iterator[Tensor]) -> Iterator[tuple[int, Tensor]]:
    first = 0
    for rows in pieces:
        yield first, rows
        first += len(rows)


def unpacked(stored: Array, entry: WeightEntry) -> Array:
    """Bytes of a U8 or U4 weight as unsigned integers, one in a byte, in the weight's shape; F8_E4M3 as its bits."""
    if entry.dtype == "U4":
        stored = np.stack([stored & 15, stored >> 4], axis=-1).reshape(-1)[: int(np.prod(entry.shape))]
    return stored.reshape(entry.shape)


def dequantize(
    values: Array, scales: Array, zero_points: Array | None, facts: QuantizedWeight
) -> Array:
    """(value - zero point) * scale in float32.

    Args:
        values: Unsigned integers [out, in].
        scales: float32 [out, in / group_size], or [out].
        zero_points: Shape of the scales; None where it is the middle of the range throughout.
        facts: For bits and group size.
    """
    group = facts.group_size or values.shape[1]
    grouped = values.reshape(values.shape[0], -1, group).astype(np.float32)
    middle = np.float32(1 << (facts.bits - 1))
    grouped -= middle if zero_points is None else zero_points.reshape(values.shape[0], -1, 1).astype(np.float32)
    grouped *= scales.reshape(values.shape[0], -1, 1)
    return grouped.reshape(values.shape)

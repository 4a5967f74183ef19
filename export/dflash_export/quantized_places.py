"""A weight as the three tensors a quantised one is stored in, each made piece by piece from the checkpoint's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from dflash_export.piece_threads import map_pieces
from dflash_export.quantization import Scheme, require_whole_groups
from dflash_export.tensor_files import FLOAT8, FLOAT_DTYPES, TensorPlace, stored_bytes
from dflash_runtime.bundle import QuantizedWeight
from dflash_runtime.errors import CheckpointError

Role = Literal["values", "scales", "zero_points"]
ROLES: tuple[Role, ...] = ("values", "scales", "zero_points")
ROUND_TO_NEAREST = "round-to-nearest"
_PIECE_BYTES = 3 << 17
"""Of a matrix at a time. What rounding makes of it stays in the CPU's cache, and in fp32
stays below the size from which a build returns every block to the system, which would be most of the work."""
FLOAT8_SCALES = "F32"
"""In any bundle: there is one a row, and the formats that others write have them so."""
KEPT_SCALE_BYTES = 192 << 20
"""Scales are written long after the values they were found with; so many bytes of them wait in memory, and the rest is
found again."""


@dataclasses.dataclass(frozen=True)
class QuantizedRows:
    """Some rows of a quantised weight."""

    values: Tensor
    """uint8 [rows, in], one value in a byte; floats of eight bits as their bits."""
    scales: Tensor
    """[rows, groups] in the dtype they are stored in."""
    zero_points: Tensor | None
    """uint8 [rows, groups]."""


_NO_VALUES = torch.empty(0, dtype=torch.uint8)
RowSource = Callable[[Role], Iterator[QuantizedRows]]
"""All rows of a weight in order, some at a time; may be asked for again. Only the part that is named need be right."""


@dataclasses.dataclass(frozen=True)
class QuantizedPart(TensorPlace):
    """Values, scales or zero points of one weight; file and offset are those of the tensor they are made from."""

    role: Role
    source: RowSource

    def chunks(self, chunk_bytes: int = _PIECE_BYTES) -> Iterator[bytes]:
        """The part's bytes as the bundle stores them. Sub-bytes that do not fill a byte wait for the next piece."""
        left: Tensor | None = None
        for rows in self.source(self.role):
            part = getattr(rows, self.role)
            if self.role == "scales":
                yield part.contiguous().view(torch.uint8).numpy().tobytes()
                continue
            flat = part.reshape(-1)
            if self.dtype == "U4":
                flat = flat if left is None else torch.cat([left, flat])
                whole = flat.numel() // 2 * 2
                flat, left = flat[:whole], flat[whole:]
                flat = flat[0::2] | (flat[1::2] << 4)
            yield flat.numpy().tobytes()
        if left is not None and left.numel():
            yield left.numpy().tobytes()


def quantized_parts(
    name: str, like: TensorPlace, facts: QuantizedWeight, scale_dtype: str, source: RowSource, *,
    floating: bool = False,
) -> dict[str, TensorPlace]:
    """Places of a quantised weight, by their names in the bundle.

    Args:
        name: The weight.
        like: Where it comes from, for file, offset and shape [out, in].
        facts: How it is held.
        scale_dtype: F32, F16 or BF16.
        source: Its rows.
        floating: Values are floats of eight bits.
    """
    integers = FLOAT8 if floating else "U4" if facts.bits == 4 else "U8"
    rows, columns = like.shape
    grouped = (rows,) if facts.group_size is None else (rows, columns // facts.group_size)
    parts: list[tuple[str | None, Role, str, tuple[int, ...]]] = [
        (name, "values", integers, like.shape),
        (facts.scales, "scales", scale_dtype, grouped),
        (facts.zero_points, "zero_points", integers, grouped),
    ]
    return {
        part: QuantizedPart(like.file, like.offset_bytes, stored_bytes(shape, dtype), dtype, shape, role, source)
        for part, role, dtype, shape in parts
        if part is not None
    }


def quantized_facts(name: str, bits: int, group_size: int | None, symmetric: bool, origin: str) -> QuantizedWeight:
    """How a weight is held, with the names of its parts."""
    zero_points = None if symmetric else f"{name}.zero_points"
    return QuantizedWeight(bits, group_size, f"{name}.scales", zero_points, origin)


def quantize_places(
    places: Mapping[str, TensorPlace], wanted: Mapping[str, Scheme], scale_dtype: str
) -> tuple[dict[str, TensorPlace], dict[str, QuantizedWeight]]:
    """Puts quantised tensors in the place of some of a checkpoint's, by rounding to the nearest.

    Nothing is read yet: rows are read, rounded and forgotten when the parts are written.

    Args:
        places: Bundle name -> tensor.
        wanted: Schemes by bundle name.
        scale_dtype: Dtype of the scales, the bundle's own.

    Raises:
        CheckpointError: groups that do not divide a matrix, or a tensor that is not a float matrix.
    """
    found, facts, kept = dict(places), {}, _KeptScales()
    for name, scheme in wanted.items():
        place = places[name]
        if len(place.shape) != 2 or place.dtype not in FLOAT_DTYPES:
            raise CheckpointError(f"{name} is {place.dtype} {list(place.shape)}; only float matrices are quantised.")
        require_whole_groups(name, place.shape, scheme)
        facts[name] = quantized_facts(name, scheme.bits, scheme.group_size, scheme.symmetric, ROUND_TO_NEAREST)
        wide = FLOAT8_SCALES if scheme.floating else scale_dtype
        source = _rounding_source(place, scheme, wide, kept)
        found |= quantized_parts(name, place, facts[name], wide, source, floating=scheme.floating)
    return found, facts


def float_rows(place: TensorPlace) -> Iterator[Tensor]:
    """The rows of a float matrix in their stored dtype, some megabytes at a time."""
    dtype = FLOAT_DTYPES[place.dtype]
    row_bytes = math.prod(place.shape[1:]) * dtype.itemsize
    for piece in place.chunks(max(1, _PIECE_BYTES // row_bytes) * row_bytes):
        yield torch.frombuffer(bytearray(piece), dtype=dtype).view(-1, *place.shape[1:])


class _KeptScales:
    """Scales and zero points of the weights whose values were written, within the limit."""

    def __init__(self) -> None:
        self._left_bytes = KEPT_SCALE_BYTES

    def room_for(self, shape: tuple[int, ...], scheme: Scheme, dtype: torch.dtype) -> QuantizedRows | None:
        """One block for all of a weight [out, in], None where there is no room left.

        Small ones, kept as they are found among large ones that go, would keep the memory of these.
        """
        grouped = (shape[0], shape[1] // (scheme.group_size or shape[1]))
        points = None if scheme.symmetric else torch.empty(grouped, dtype=torch.uint8)
        rows = QuantizedRows(_NO_VALUES, torch.empty(grouped, dtype=dtype), points)
        if _size_bytes(rows) > self._left_bytes:
            return None
        self._left_bytes -= _size_bytes(rows)
        return rows

    def give_back(self, rows: list[QuantizedRows]) -> None:
        """They were written."""
        self._left_bytes += sum(map(_size_bytes, rows))
        rows.clear()


def _size_bytes(rows: QuantizedRows) -> int:
    return sum(tensor.nbytes for tensor in (rows.scales, rows.zero_points) if tensor is not None)


def _rounding_source(place: TensorPlace, scheme: Scheme, scale_dtype: str, kept: _KeptScales) -> RowSource:
    found: list[QuantizedRows] = []
    dtype = FLOAT_DTYPES[scale_dtype]

    def rows(role: Role) -> Iterator[QuantizedRows]:
        if role != "values" and found:
            yield from found
            if role == "zero_points" or scheme.symmetric:
                kept.give_back(found)
            return
        waiting = kept.room_for(place.shape, scheme, dtype) if role == "values" and not found else None
        first = 0
        for rounded in map_pieces(partial(round_rows, scheme=scheme, scale_dtype=dtype), float_rows(place)):
            if waiting is not None:
                waiting.scales[first : first + len(rounded.scales)] = rounded.scales
                if waiting.zero_points is not None and rounded.zero_points is not None:
                    waiting.zero_points[first : first + len(rounded.scales)] = rounded.zero_points
            first += len(rounded.scales)
            yield rounded
        if waiting is not None:
            found.append(waiting)

    return rows


def round_rows(rows: Tensor, scheme: Scheme, scale_dtype: torch.dtype) -> QuantizedRows:
    """Rounds rows [n, in] to the nearest values of a scheme.

    Scales are rounded to their dtype first and values against that, so the dtype of the scales costs almost nothing.
    """
    grouped = rows.float().reshape(rows.shape[0], -1, scheme.group_size or rows.shape[1])
    if scheme.floating:
        largest = torch.finfo(torch.float8_e4m3fn).max
        scales = (grouped.abs().amax(-1) / largest).to(scale_dtype)
        # Beyond the largest there is only NaN, and a quotient may be rounded up to it.
        floats = _steps(grouped, scales.float()).clamp(-largest, largest).to(torch.float8_e4m3fn)
        return QuantizedRows(floats.view(torch.uint8).reshape(rows.shape), scales, None)
    middle = 1 << (scheme.bits - 1)
    if scheme.symmetric:
        scales = _symmetric_scales(grouped, middle, scale_dtype)
        values = _steps(grouped, scales).round() + middle
        return QuantizedRows(_to_bytes(values, 2 * middle - 1).reshape(rows.shape), scales.to(scale_dtype), None)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales = ((high - low) / (2 * middle - 1)).to(scale_dtype).float()
    zero_points = _to_bytes(_steps(-low[..., None], scales).round(), 2 * middle - 1)[..., 0]
    values = _steps(grouped, scales).round() + zero_points[..., None]
    return QuantizedRows(
        _to_bytes(values, 2 * middle - 1).reshape(rows.shape), scales.to(scale_dtype), zero_points
    )


def _symmetric_scales(grouped: Tensor, middle: int, dtype: torch.dtype) -> Tensor:
    """Scales [n, groups] in fp32: of the two that are usual, the one with the smaller squared error.

    The largest magnitude becomes the largest value of either sign, or with its sign the lowest value, which has one
    step more. Measured on SmolLM2-135M, int4 in groups of 32: perplexity 13.57 with the first alone, 12.36 with the
    second, 12.34 with the better one.
    """
    largest = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True))[..., 0]
    candidates = [(scale.to(dtype).float()) for scale in (largest.abs() / (middle - 1), largest / -middle)]
    errors = []
    for scales in candidates:
        values = _steps(grouped, scales).round().clamp(-middle, middle - 1)
        errors.append(((values * scales[..., None] - grouped) ** 2).sum(-1))
    return torch.where(errors[0] <= errors[1], candidates[0], candidates[1])


def _steps(grouped: Tensor, scales: Tensor) -> Tensor:
    """Weights in units of their scale; 0 where the scale is 0."""
    divisor = torch.where(scales == 0, torch.inf, scales)
    return grouped / divisor[..., None]


def _to_bytes(values: Tensor, largest: int) -> Tensor:
    return values.clamp(0, largest).to(torch.uint8)

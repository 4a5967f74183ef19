"""A quantised weight of a checkpoint, whatever its format: integers, scales and zero points by rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dflash_export.quantization import GROUP_SIZES
from dflash_export.quantized_places import (
    FLOAT8_SCALES,
    QuantizedRows,
    Role,
    RowSource,
    quantized_facts,
    quantized_parts,
)
from dflash_export.tensor_files import FLOAT8, FLOAT_DTYPES, TensorPlace, stored_bytes
from dflash_runtime.bundle import QuantizedWeight
from dflash_runtime.errors import CheckpointError

Array = npt.NDArray[Any]
_PIECE_ELEMENTS = 1 << 22
_MAPPED = {"I32": np.int32, "I64": np.int64, "I8": np.int8, "U8": np.uint8, "F32": np.float32, "F16": np.float16,
           "BF16": np.uint16, FLOAT8: np.uint8}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ImportedPlace(TensorPlace):
    """One quantised weight; dtype is U4, U8 or F8_E4M3, shape [out, in], whatever the checkpoint's layout is."""

    group_size: int | None
    """None for one scale a row."""
    symmetric: bool
    scale_dtype: str
    origin: str
    source: RowSource

    @property
    def bits(self) -> int:
        """Of a value."""
        return 4 if self.dtype == "U4" else 8


def imported_parts(
    places: Mapping[str, TensorPlace], linear: Collection[str], dtype: str
) -> tuple[dict[str, TensorPlace], dict[str, QuantizedWeight]]:
    """Places and facts of the weights a checkpoint brings quantised.

    Args:
        places: Bundle name -> tensor.
        linear: Names of the matrices that products read.
        dtype: Of the bundle; scales are widened to fp32 and never narrowed.

    Raises:
        CheckpointError: a weight that is no plain matrix, or scales the bundle's precision cannot hold.
    """
    found: dict[str, TensorPlace] = {}
    facts: dict[str, QuantizedWeight] = {}
    for name, place in places.items():
        if not isinstance(place, ImportedPlace):
            continue
        if name not in linear:
            raise CheckpointError(
                f"{name} is quantised ({place.origin}) and no plain matrix [out, in] of the model: an embedding, whose "
                "rows are picked, a merged or a transposed weight. Give a checkpoint that leaves it in floats."
            )
        floating = place.dtype == FLOAT8
        if dtype not in (place.scale_dtype, "F32") and not floating:
            words = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
            raise CheckpointError(
                f"{name} has scales in {words[place.scale_dtype]}, which {words[dtype]} cannot hold exactly. Build "
                f"with --precision {words[place.scale_dtype]}{'' if place.scale_dtype == 'F32' else ' or fp32'}."
            )
        facts[name] = quantized_facts(name, place.bits, place.group_size, place.symmetric, place.origin)
        wide = FLOAT8_SCALES if floating else dtype
        source = _in_dtype(place.source, FLOAT_DTYPES[wide])
        found |= quantized_parts(name, place, facts[name], wide, source, floating=floating)
    return found, facts


def _in_dtype(source: RowSource, dtype: torch.dtype) -> RowSource:
    def rows(role: Role) -> Iterator[QuantizedRows]:
        for piece in source(role):
            yield dataclasses.replace(piece, scales=piece.scales.to(dtype))

    return rows


def mapped(place: TensorPlace) -> Array:
    """A tensor of a checkpoint, mapped from its file; BF16 as its bits."""
    return np.memmap(place.file, _MAPPED[place.dtype], "r", place.offset_bytes, place.shape)


def as_floats(array: Array, dtype: str) -> Tensor:
    """Mapped floats as a tensor of their dtype."""
    tensor = torch.from_numpy(np.ascontiguousarray(array).copy())
    return tensor.view(torch.bfloat16) if dtype == "BF16" else tensor


def imported_place(
    like: TensorPlace,
    shape: tuple[int, int],
    bits: int,
    group_size: int | None,
    symmetric: bool,
    scale_dtype: str,
    origin: str,
    read_rows: Callable[[int, int], tuple[Array, Tensor, Array | None]],
    row_step: int = 1,
) -> ImportedPlace:
    """A place whose rows `read_rows(start, stop)` gives: values, scales [n, groups], and zero points or None.

    Args:
        like: The tensor of the values, for file and offset.
        shape: [out, in].
        bits: 4 or 8.
        group_size: Inputs that share a scale; None for one scale a row.
        symmetric: Zero points are the middle of the range.
        scale_dtype: Of the scales.
        origin: The format's name.
        read_rows: Values and zero points unsigned, one in a byte.
        row_step: Rows are asked for in multiples of this.

    Raises:
        CheckpointError: the scales have no float dtype, or groups do not divide the inputs.
    """
    rows, columns = shape
    repeat = 1
    if scale_dtype not in FLOAT_DTYPES:
        raise CheckpointError(f"{like.file.name} holds scales of {scale_dtype}; only float ones are taken.")
    if bits == 4 and group_size is None:
        # Kernels of int4 want groups: a row's one scale is repeated, which changes no value.
        group_size = next((size for size in reversed(GROUP_SIZES) if columns % size == 0), None)
        repeat = columns // group_size if group_size else 1
    if bits == 4 and (group_size not in (16, *GROUP_SIZES, 256) or columns % group_size):
        raise CheckpointError(f"{like.file.name} has int4 groups of {group_size} over {columns} inputs: no kernels.")
    step = max(row_step, _PIECE_ELEMENTS // columns // row_step * row_step)

    def source(role: Role) -> Iterator[QuantizedRows]:
        for start in range(0, rows, step):
            values, scales, zeros = read_rows(start, min(start + step, rows))
            scales = scales.repeat(1, repeat) if repeat > 1 else scales
            points = None if symmetric or zeros is None else torch.from_numpy(np.ascontiguousarray(zeros))
            if points is not None and repeat > 1:
                points = points.repeat(1, repeat)
            yield QuantizedRows(torch.from_numpy(np.ascontiguousarray(values)), scales, points)

    dtype = "U4" if bits == 4 else "U8"
    return ImportedPlace(
        like.file, like.offset_bytes, stored_bytes(shape, dtype), dtype, shape, group_size, symmetric, scale_dtype,
        origin, source,
    )  # fmt: skip


def float8_place(values: TensorPlace, scale: TensorPlace, origin: str) -> ImportedPlace:
    """A weight [out, in] of e4m3 floats with one scale, or one for each row.

    Raises:
        CheckpointError: scales of another kind, such as one for each block of a matrix.
    """
    rows, columns = values.shape
    count = math.prod(scale.shape)
    if scale.dtype not in FLOAT_DTYPES or count not in (1, rows) or scale.shape not in ((), (1,), (1, 1), (rows,),
                                                                                       (rows, 1)):  # fmt: skip
        raise CheckpointError(
            f"{values.file.name} holds FP8 weights [{rows}, {columns}] with {scale.dtype} scales {list(scale.shape)}; "
            "one scale a matrix or one a row is taken."
        )
    step = max(1, _PIECE_ELEMENTS // columns)

    def source(role: Role) -> Iterator[QuantizedRows]:
        for start in range(0, rows, step):
            stored = torch.from_numpy(np.array(mapped(values)[start : start + step]))
            scales = as_floats(np.atleast_1d(mapped(scale)), scale.dtype).reshape(-1, 1)
            own = scales.expand(len(stored), 1) if count == 1 else scales[start : start + step]
            yield QuantizedRows(stored, own, None)

    return ImportedPlace(
        values.file, values.offset_bytes, values.length_bytes, FLOAT8, (rows, columns), None, True, scale.dtype, origin,
        source,
    )  # fmt: skip


def unpack(words: Array, bits: int, axis: int) -> Array:
    """int32 words as unsigned integers, the first in the lowest bits, side by side along an axis of two."""
    count = 32 // bits
    shifts = np.arange(count, dtype=np.uint32) * bits
    unsigned = np.ascontiguousarray(words).view(np.uint32)
    parts = ((unsigned[..., None] >> shifts) & ((1 << bits) - 1)).astype(np.uint8)  # [a, b, count]
    if axis == 1:
        return parts.reshape(parts.shape[0], -1)
    return parts.transpose(0, 2, 1).reshape(-1, parts.shape[1])

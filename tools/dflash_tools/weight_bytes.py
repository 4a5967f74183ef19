"""Bytes of weights by their sizes and how they are stored, exact: in a bundle, and on a GPU with TensorRT's engines.

A bundle holds values, scales and zero points. Engines are given floats and 8-bit values with their scales, hold int4
values with theirs, and in place of zero points hold (middle - zero point) * scale in fp32, one for each scale.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator

from dflash_tools.model_shape import DrafterShape, Matrix, ModelShape, WeightForm

ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
FLOAT8_SCALE_BYTES = 4
"""fp32 in any bundle."""
OFFSET_BYTES = 4
DEFAULT_GROUP_SIZE = 32
"""Of a build that is given none."""
_CONTEXT_PARTS = ("k_proj", "v_proj")


@dataclasses.dataclass(frozen=True)
class Storage:
    """How a model's weights are stored, where its checkpoint brings none that are quantised already."""

    matrices: str
    """fp32, fp16, bf16, int8 or fp8 (a scale per output channel), int4 (a scale per group of inputs)."""
    tables: str
    """The same for the head, and for an embedding that is the head too; one that is not stays in floats."""
    group_size: int = DEFAULT_GROUP_SIZE
    """Of int4."""
    symmetric: bool = True
    """Of int4: without zero points."""
    floats: str = ""
    """fp32, fp16 or bf16 of what is not quantised; empty for what the other two say, else fp16."""

    @property
    def float_kind(self) -> str:
        """Of vectors, activations, caches, scales, and matrices that stay in floats."""
        return self.floats or next((kind for kind in (self.matrices, self.tables) if kind in ITEM_BYTES), "fp16")

    @property
    def item_bytes(self) -> int:
        """The same in bytes."""
        return ITEM_BYTES[self.float_kind]

    def form(self, matrix: Matrix, kind: str) -> WeightForm:
        """How a matrix is stored where its checkpoint leaves it open."""
        if matrix.form is not None:
            return matrix.form
        if kind in ITEM_BYTES or not matrix.quantisable:
            return WeightForm(kind if kind in ITEM_BYTES else self.float_kind)
        return WeightForm(kind, self.group_size, self.symmetric) if kind == "int4" else WeightForm(kind)


@dataclasses.dataclass(frozen=True)
class WeightParts:
    """Bytes of linear weights."""

    values: int
    scales: int = 0
    zero_points: int = 0
    offsets: int = 0
    """What engines hold in place of zero points."""
    values_are_held: bool = False
    """int4: engines hold values and scales instead of taking them as inputs."""

    @property
    def stored(self) -> int:
        """In the bundle's files."""
        return self.values + self.scales + self.zero_points

    @property
    def held(self) -> int:
        """In an engine that reads them."""
        return self.offsets + (self.values + self.scales if self.values_are_held else 0)

    @property
    def given(self) -> int:
        """Of the copy on the device that all engines share."""
        return 0 if self.values_are_held else self.values + self.scales


def weight_parts(matrix: Matrix, form: WeightForm, item_bytes: int) -> WeightParts:
    """Bytes of all matrices of a shape.

    Args:
        matrix: Rows are output features.
        form: How its numbers are stored.
        item_bytes: Of a scale that is not FP8's.
    """
    if form.kind in ITEM_BYTES:
        return WeightParts(matrix.elements * ITEM_BYTES[form.kind])
    groups = 1 if form.group_size is None else math.ceil(matrix.columns / form.group_size)
    scales = matrix.rows * groups * matrix.count
    if form.kind == "fp8":
        return WeightParts(matrix.elements, scales * FLOAT8_SCALE_BYTES)
    per_byte = 2 if form.kind == "int4" else 1
    values = matrix.count * math.ceil(matrix.rows * matrix.columns / per_byte)
    points = 0 if form.symmetric else matrix.count * math.ceil(matrix.rows * groups / per_byte)
    offsets = 0 if form.symmetric else scales * OFFSET_BYTES
    return WeightParts(values, scales * item_bytes, points, offsets, form.kind == "int4")


def matrix_bytes(matrix: Matrix, storage: Storage) -> int:
    """Stored bytes of linear weights of a layer, scales and zero points included."""
    return weight_parts(matrix, storage.form(matrix, storage.matrices), storage.item_bytes).stored


def embedding_bytes(shape: ModelShape, storage: Storage) -> int:
    """Stored bytes of the embedding; rows are picked from it, so it is quantised only where the head reads it too."""
    return sum(parts.stored for parts in _embedding(shape, storage))


def head_bytes(shape: ModelShape, storage: Storage) -> int:
    """Stored bytes that the head reads: its own, or those of a tied table."""
    return sum(parts.stored for parts in _head(shape, storage)) or embedding_bytes(shape, storage)


def model_bytes(shape: ModelShape, storage: Storage) -> int:
    """Weights of a model in a bundle, a tied table once. For a drafter's body: what it brings itself."""
    return sum(parts.stored for parts in _parts(shape, storage)) + _vector_bytes(shape, storage)


def drafter_bytes(drafter: DrafterShape, storage: Storage) -> int:
    """Weights of a drafter in a bundle; embedding and head are the target's and counted there."""
    return model_bytes(drafter.body, storage) + matrix_bytes(drafter.fuse, storage)


def given_bytes(target: ModelShape, drafter: DrafterShape | None, storage: Storage, drafter_storage: Storage) -> int:
    """Weights on the device that engines take as inputs, each once."""
    own = 0 if drafter is None else given_drafter_bytes(drafter, drafter_storage)
    return given_target_bytes(target, storage) + own


def given_target_bytes(target: ModelShape, storage: Storage) -> int:
    """The target's share of `given_bytes`."""
    return sum(parts.given for parts in _parts(target, storage)) + _vector_bytes(target, storage)


def given_drafter_bytes(drafter: DrafterShape, storage: Storage) -> int:
    """The drafter's share; a fusing matrix in floats, and the norm behind it, are given in fp32 as they are used."""
    norm = drafter.body.hidden_size * (ITEM_BYTES["fp32"] - storage.item_bytes)
    return given_target_bytes(drafter.body, storage) + _fuse(drafter, storage).given + norm


def held_bytes(
    target: ModelShape, drafter: DrafterShape | None, storage: Storage, drafter_storage: Storage
) -> tuple[int, int]:
    """Weights that engines hold themselves: all of them once, and what lies in two engines again.

    The head lies in the target's engine and in the drafter's, keys and values of a drafter in its own and its
    context's.
    """
    once, again = held_target_bytes(target, storage), 0
    if drafter is not None:
        once += held_drafter_bytes(drafter, drafter_storage)
        again = sum(_layer_parts(matrix, drafter_storage).held for matrix in context_matrices(drafter))
        if not drafter.body.head_elements:
            tied = not target.head_elements
            again += sum(parts.held for parts in (_embedding if tied else _head)(target, storage))
    return once, again


def context_matrices(drafter: DrafterShape) -> list[Matrix]:
    """Keys' and values' of every layer: the drafter's engine and its context's both read them."""
    return [m for m in drafter.body.matrices if any(name.endswith(_CONTEXT_PARTS) for name in m.modules)]


def held_target_bytes(target: ModelShape, storage: Storage) -> int:
    """What the target's engine holds."""
    return sum(parts.held for parts in _parts(target, storage))


def held_drafter_bytes(drafter: DrafterShape, storage: Storage) -> int:
    """What engines hold of a drafter, each weight once."""
    return held_target_bytes(drafter.body, storage) + _fuse(drafter, storage).held


def device_target_bytes(target: ModelShape, storage: Storage) -> int:
    """The target's weights on the device, each once."""
    return given_target_bytes(target, storage) + held_target_bytes(target, storage)


def device_drafter_bytes(drafter: DrafterShape, storage: Storage) -> int:
    """The drafter's weights on the device, each once."""
    return given_drafter_bytes(drafter, storage) + held_drafter_bytes(drafter, storage)


def every_form(shape: ModelShape, storage: Storage) -> Iterator[tuple[Matrix, WeightForm]]:
    """All matrices of a model and how they are stored, tables included."""
    for matrix in shape.matrices:
        yield matrix, storage.form(matrix, storage.matrices)
    yield from _embedding_forms(shape, storage)
    yield from _head_forms(shape, storage)


def _parts(shape: ModelShape, storage: Storage) -> Iterator[WeightParts]:
    return (weight_parts(matrix, form, storage.item_bytes) for matrix, form in every_form(shape, storage))


def _layer_parts(matrix: Matrix, storage: Storage) -> WeightParts:
    return weight_parts(matrix, storage.form(matrix, storage.matrices), storage.item_bytes)


def _fuse(drafter: DrafterShape, storage: Storage) -> WeightParts:
    """The fusing matrix as engines take it."""
    form = storage.form(drafter.fuse, storage.matrices)
    wide = WeightForm("fp32") if form.kind in ITEM_BYTES else form
    return weight_parts(drafter.fuse, wide, storage.item_bytes)


def _embedding(shape: ModelShape, storage: Storage) -> Iterable[WeightParts]:
    return (weight_parts(*pair, storage.item_bytes) for pair in _embedding_forms(shape, storage))


def _head(shape: ModelShape, storage: Storage) -> Iterable[WeightParts]:
    return (weight_parts(*pair, storage.item_bytes) for pair in _head_forms(shape, storage))


def _embedding_forms(shape: ModelShape, storage: Storage) -> Iterator[tuple[Matrix, WeightForm]]:
    if shape.embedding_elements:
        tied = not shape.head_elements
        table = _table(shape, shape.embedding_elements, shape.head_form if tied else None)
        yield table, storage.form(table, storage.tables if tied else storage.float_kind)


def _head_forms(shape: ModelShape, storage: Storage) -> Iterator[tuple[Matrix, WeightForm]]:
    if shape.head_elements:
        table = _table(shape, shape.head_elements, shape.head_form)
        yield table, storage.form(table, storage.tables)


def _table(shape: ModelShape, elements: int, form: WeightForm | None) -> Matrix:
    return Matrix(elements // shape.hidden_size, shape.hidden_size, form=form)


def _vector_bytes(shape: ModelShape, storage: Storage) -> int:
    return shape.vector_elements * storage.item_bytes

"""What a plan is asked for: precisions, context, block sizes, TensorRT; every default settled as a build settles it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dflash_runtime.errors import CheckpointError
from dflash_tools.drafter_shape import default_block_sizes
from dflash_tools.plan_formulas import capacity_tokens
from dflash_tools.plan_sources import Pair
from dflash_tools.weight_bytes import DEFAULT_GROUP_SIZE, ITEM_BYTES, Storage

if TYPE_CHECKING:
    from dflash_engines.tensorrt_versions import GraphForm

DEFAULT_CONTEXT_TOKENS = 4096
KEEP = "keep"
NEWEST_TENSORRT = "10.16"
"""On the boards with JetPack 7.2, and the form TensorRT-RTX takes too."""


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """What the pair shall serve, and how weights are stored that a checkpoint does not bring quantised already."""

    precision: str
    """Of the target's linear layers: fp16, bf16, int8, int4 or fp8."""
    table_precision: str
    """Of the head, and of an embedding tied to it: keep, int8, int4 or fp8."""
    max_context_tokens: int
    block_sizes: tuple[int, ...]
    drafter_precision: str = KEEP
    """Of the drafter's linear layers: keep, int8, int4 or fp8."""
    group_size: int = DEFAULT_GROUP_SIZE
    """Of int4."""
    symmetric: bool = True
    """Of int4: without zero points."""
    floats: str = "fp16"
    """fp16 or bf16, of what is kept."""
    tensorrt: str = NEWEST_TENSORRT
    """Version of the TensorRT that builds and runs: it decides the form of the graphs."""

    @property
    def form(self) -> GraphForm:
        """`fused`, or `primitive` where TensorRT has no KV update."""
        from dflash_engines.tensorrt_versions import row_for

        return row_for("tensorrt", self.tensorrt).form

    @property
    def capacity_rows(self) -> int:
        """Rows of every cache."""
        return capacity_tokens(self.max_context_tokens, self.block_sizes)

    @property
    def layouts(self) -> list[int]:
        """Of the primitive form: rows of cache that calls read, smallest first. The fused form reads the valid ones."""
        if self.form == "fused":
            return []
        from dflash_engines.tensorrt_versions import cache_layouts

        return cache_layouts("primitive", self.capacity_rows)

    @property
    def storage(self) -> Storage:
        """The target's, in the words of the formulas."""
        return self._storage(self.precision, self.floats if self.table_precision == KEEP else self.table_precision)

    @property
    def drafter_storage(self) -> Storage:
        """The drafter's."""
        kind = self.floats if self.drafter_precision == KEEP else self.drafter_precision
        return self._storage(kind, kind)

    def _storage(self, matrices: str, tables: str) -> Storage:
        return Storage(matrices, tables, self.group_size, self.symmetric, self.floats)


def settle_options(
    pair: Pair,
    precision: str | None,
    table_precision: str,
    max_context: int | None,
    block_sizes: tuple[int, ...],
    drafter_precision: str = KEEP,
    group_size: int = DEFAULT_GROUP_SIZE,
    symmetric: bool = True,
    tensorrt: str = NEWEST_TENSORRT,
) -> PlanOptions:
    """Options with every default settled as an export settles them.

    Raises:
        CheckpointError: a context or a block size that the pair cannot serve, or weights quantised twice.
        EngineError: a TensorRT no graph was written for.
    """
    from dflash_engines.tensorrt_versions import row_for
    from dflash_export.quantization import quantize_options

    row_for("tensorrt", tensorrt)
    kinds = (KEEP if precision is None or precision in ITEM_BYTES else precision, table_precision, drafter_precision)
    quantize_options(*kinds, group_size, symmetric=symmetric)
    _refuse_twice(pair, *kinds)
    limit = _settle_context_limit(pair, max_context)
    largest = pair.drafter.block_size
    for size in block_sizes:
        if size < 2:
            raise CheckpointError(f"--block-size {size} is no block: it is the anchor and at least one draft, so >= 2.")
        if size > largest:
            raise CheckpointError(f"--block-size {size} exceeds {largest}, the block the drafter was trained for.")
    own = pair.target.stored_precision
    floats = precision if precision in ITEM_BYTES else own if own in ("fp16", "bf16") else "fp16"
    return PlanOptions(
        precision=precision or floats,
        table_precision=table_precision,
        max_context_tokens=max_context or min(DEFAULT_CONTEXT_TOKENS, limit),
        block_sizes=tuple(sorted(set(block_sizes))) or default_block_sizes(largest),
        drafter_precision=drafter_precision,
        group_size=group_size,
        symmetric=symmetric,
        floats=floats,
        tensorrt=tensorrt,
    )


def _settle_context_limit(pair: Pair, max_context: int | None) -> int:
    limits = [(pair.target.max_position_tokens, "the target"), (pair.drafter.body.max_position_tokens, "the drafter")]
    limit, whose = min(((n or 1 << 30, whose) for n, whose in limits), key=lambda limit: limit[0])
    if max_context is not None and max_context < 2:
        raise CheckpointError(f"--max-context {max_context} leaves no room for a prompt and an answer; give 2 or more.")
    if max_context is not None and max_context > limit:
        raise CheckpointError(f"--max-context {max_context} exceeds {limit}, the most {whose} serves. Give less.")
    return limit


def _refuse_twice(pair: Pair, layers: str, head: str, drafter: str) -> None:
    """What a checkpoint brings quantised is not rounded again."""
    target, body = pair.target, pair.drafter.body
    layers_own = any(matrix.form is not None for matrix in target.matrices)
    drafter_own = any(matrix.form is not None for matrix in (*body.matrices, pair.drafter.fuse))
    for name, own, asked, option in (
        (target.name, layers_own, layers, "--precision at fp16 or bf16"),
        (target.name, target.head_form is not None, head, "--quantize-head at keep"),
        (body.name, drafter_own, drafter, "--quantize-drafter at keep"),
    ):
        if own and asked != KEEP:
            raise CheckpointError(f"{name} is quantised already and is not rounded again to {asked}. Leave {option}.")

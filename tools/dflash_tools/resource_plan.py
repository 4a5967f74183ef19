"""A plan: what a pair takes on a device, whether that fits, and what a cycle takes in time."""

from __future__ import annotations

import dataclasses

from dflash_runtime.errors import CheckpointError
from dflash_tools import plan_formulas as formulas
from dflash_tools.device_table import Device
from dflash_tools.drafter_shape import default_block_sizes
from dflash_tools.model_shape import Matrix, WeightForm
from dflash_tools.plan_sources import Pair
from dflash_tools.weight_bytes import (
    DEFAULT_GROUP_SIZE,
    ITEM_BYTES,
    Storage,
    device_drafter_bytes,
    device_target_bytes,
    every_form,
    held_bytes,
)

DEFAULT_CONTEXT_TOKENS = 4096
FLOAT8_SM = 89
KEEP = "keep"
EXACT, PREDICTED, READ = "exact", "predicted", "read on this device"


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


@dataclasses.dataclass(frozen=True)
class Place:
    """A device, and the memory that a pair may take on it."""

    device: Device
    available_bytes: int
    available_from: str
    system_bytes: int
    """Kept for the system; 0 where `available_bytes` is what the system left free."""


@dataclasses.dataclass(frozen=True)
class MemoryItem:
    """One line of the sum."""

    name: str
    size_bytes: int
    basis: str
    """`exact` (bytes of what is stored) or `predicted`."""


@dataclasses.dataclass(frozen=True)
class BlockTime:
    """One cycle: draft, verify, append."""

    block_size: int
    draft_ms: float
    verify_ms: float
    append_ms: float
    cycle_ms: float
    needed_acceptance_length: float
    """Tokens a cycle must commit on average to be as fast as plain decoding."""

    @property
    def can_pay_off(self) -> bool:
        """A cycle commits at most its block size."""
        return self.needed_acceptance_length <= self.block_size


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `dflash-export plan` says."""

    pair: Pair
    place: Place
    options: PlanOptions
    run_items: tuple[MemoryItem, ...]
    build_items: tuple[MemoryItem, ...]
    context_depth_tokens: int
    plain_ms: float
    blocks: tuple[BlockTime, ...]
    obstacles: tuple[str, ...] = ()
    """Why no engine can be built of it there, whatever the memory."""

    @property
    def kinds(self) -> set[str]:
        """Of the weights of both models."""
        return {form.kind for _, form in _weights(self.pair, self.options)}

    @property
    def run_bytes(self) -> int:
        """Memory while it runs."""
        return sum(item.size_bytes for item in self.run_items)

    @property
    def build_bytes(self) -> int:
        """Peak while its engines are built on the device."""
        return sum(item.size_bytes for item in self.build_items)

    @property
    def needed_bytes(self) -> int:
        """The larger of the two: building and running do not overlap."""
        return max(self.run_bytes, self.build_bytes)

    @property
    def fits(self) -> bool:
        """Whether it can be built and run there."""
        return not self.obstacles and self.needed_bytes <= self.place.available_bytes


def place_on(device: Device) -> Place:
    """A device of the table, idle and without a desktop."""
    system = formulas.SYSTEM_BYTES[device.unified]
    return Place(device, device.memory_bytes, "the table", system)


def settle_options(
    pair: Pair,
    precision: str | None,
    table_precision: str,
    max_context: int | None,
    block_sizes: tuple[int, ...],
    drafter_precision: str = KEEP,
    group_size: int = DEFAULT_GROUP_SIZE,
    symmetric: bool = True,
) -> PlanOptions:
    """Options with every default settled as an export settles them.

    Raises:
        CheckpointError: a context or a block size that the pair cannot serve, or weights quantised twice.
    """
    from dflash_export.quantization import quantize_options

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


def find_obstacles(pair: Pair, device: Device, options: PlanOptions) -> tuple[str, ...]:
    """What TensorRT does not take, on any board or on this one, as the builder would refuse it."""
    target = pair.target
    found = [_obstacle(matrix, form, device) for matrix, form in _weights(pair, options)]
    if not target.head_elements:
        kind = (target.head_form or WeightForm(options.table_precision)).kind
        if kind in ("int4", "fp8"):
            found.append(f"the head is the embedding too, and TensorRT picks no rows from a table in {kind}")
    return tuple(dict.fromkeys(reason for reason in found if reason))


def _weights(pair: Pair, options: PlanOptions) -> list[tuple[Matrix, WeightForm]]:
    """Every matrix of the pair, and how it is stored."""
    own, fuse = options.drafter_storage, pair.drafter.fuse
    body = every_form(pair.drafter.body, own)
    return [*every_form(pair.target, options.storage), *body, (fuse, own.form(fuse, own.matrices))]


def _obstacle(matrix: Matrix, form: WeightForm, device: Device) -> str | None:
    if form.kind == "fp8" and device.sm < FLOAT8_SM:
        return f"TensorRT takes fp8 from SM {FLOAT8_SM} on, and this is SM {device.sm}"
    if form.kind == "int8" and form.group_size is not None:
        return f"TensorRT takes int8 with one scale an output, and the checkpoint has one for {form.group_size} inputs"
    if form.group_size is not None and matrix.columns % form.group_size:
        return f"groups of {form.group_size} do not divide the {matrix.columns} inputs of a matrix"
    return None


def make_plan(pair: Pair, place: Place, options: PlanOptions) -> Plan:
    """Sums and times of a pair on a device."""
    run = run_items(pair, place, options)
    depth = options.max_context_tokens // 2
    plain, blocks = _times(pair, place.device, options, depth)
    obstacles = find_obstacles(pair, place.device, options)
    return Plan(pair, place, options, run, build_items(pair, place, options), depth, plain, blocks, obstacles)


def run_items(pair: Pair, place: Place, options: PlanOptions) -> tuple[MemoryItem, ...]:
    """What memory holds while the pair runs."""
    target, drafter, storage = pair.target, pair.drafter, options.storage
    capacity = formulas.capacity_tokens(options.max_context_tokens, options.block_sizes)
    drafter_storage = options.drafter_storage
    _, held_again = held_bytes(target, drafter, storage, drafter_storage)
    rows = [
        ("target weights", device_target_bytes(target, storage), EXACT),
        ("drafter weights", device_drafter_bytes(drafter, drafter_storage), EXACT),
        ("target KV cache", formulas.kv_bytes(target, capacity, storage.item_bytes), EXACT),
        ("drafter KV cache", formulas.kv_bytes(drafter.body, capacity, storage.item_bytes), EXACT),
        ("activations and scratch", _scratch(pair, options), PREDICTED),
        ("engines", formulas.engine_bytes(target, drafter, options.block_sizes) + held_again, PREDICTED),
        *_fixed(place),
    ]
    return tuple(MemoryItem(*row) for row in rows)


def build_items(pair: Pair, place: Place, options: PlanOptions) -> tuple[MemoryItem, ...]:
    """What memory holds at the peak of building engines on the device; a card's does not hold the builder."""
    trial = formulas.kernel_trial_bytes(pair.target, options.storage, _scratch(pair, options))
    host = builder_bytes(pair, options)
    peak = trial + (host if place.device.unified else 0)
    return tuple(MemoryItem(*row) for row in [("builder peak", peak, PREDICTED), *_fixed(place)])


def builder_bytes(pair: Pair, options: PlanOptions) -> int:
    """Peak of the process that builds the largest engine."""
    return formulas.host_builder_bytes(
        pair.target, pair.drafter, options.storage, options.drafter_storage, options.block_sizes
    )


def _scratch(pair: Pair, options: PlanOptions) -> int:
    capacity = formulas.capacity_tokens(options.max_context_tokens, options.block_sizes)
    return formulas.scratch_bytes(pair.target, pair.drafter, options.storage, capacity, max(options.block_sizes))


def _fixed(place: Place) -> list[tuple[str, int, str]]:
    return [
        ("CUDA context and libraries", formulas.RUNTIME_BYTES[place.device.unified], PREDICTED),
        ("kept for the system", place.system_bytes, PREDICTED),
    ]


def _times(pair: Pair, device: Device, options: PlanOptions, depth: int) -> tuple[float, tuple[BlockTime, ...]]:
    target, drafter, storage, own = pair.target, pair.drafter, options.storage, options.drafter_storage
    plain = formulas.verify_s(device, target, storage, 1, depth)
    blocks = []
    for size in options.block_sizes:
        draft = formulas.draft_s(device, target, drafter, storage, own, size, depth)
        verify = formulas.verify_s(device, target, storage, size, depth)
        append = formulas.append_s(device, drafter, own, size)
        cycle = draft + verify + append
        needed = formulas.needed_acceptance_length(cycle, plain)
        blocks.append(BlockTime(size, draft * 1e3, verify * 1e3, append * 1e3, cycle * 1e3, needed))
    return plain * 1e3, tuple(blocks)

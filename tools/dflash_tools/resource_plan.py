"""A plan: what a pair takes on a device, whether that fits, and what a cycle takes in time."""

from __future__ import annotations

import dataclasses

from dflash_runtime.errors import CheckpointError
from dflash_tools import plan_formulas as formulas
from dflash_tools.device_table import Device
from dflash_tools.drafter_shape import default_block_sizes
from dflash_tools.plan_sources import Pair

DEFAULT_CONTEXT_TOKENS = 4096
EXACT, PREDICTED, READ = "exact", "predicted", "read on this device"


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """What the pair shall serve, and how its weights are stored."""

    precision: str
    """Of the linear layers: fp16, bf16, int8 or int4."""
    table_precision: str
    """Of the head, and of an embedding tied to it: 16bit, int8 or int4."""
    max_context_tokens: int
    block_sizes: tuple[int, ...]

    @property
    def storage(self) -> formulas.Storage:
        """The same in the words of the formulas."""
        half = self.precision if self.precision in formulas.ITEM_BYTES else "fp16"
        return formulas.Storage(self.precision, half if self.table_precision == "16bit" else self.table_precision)


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
        return self.needed_bytes <= self.place.available_bytes


def place_on(device: Device) -> Place:
    """A device of the table, idle and without a desktop."""
    system = formulas.SYSTEM_BYTES[device.unified]
    return Place(device, device.memory_bytes, "the table", system)


def settle_options(
    pair: Pair, precision: str | None, table_precision: str, max_context: int | None, block_sizes: tuple[int, ...]
) -> PlanOptions:
    """Options with every default settled as an export settles them.

    Raises:
        CheckpointError: a context or a block size that the pair cannot serve.
    """
    limits = [(pair.target.max_position_tokens, "the target"), (pair.drafter.body.max_position_tokens, "the drafter")]
    limit, whose = min(((n or 1 << 30, whose) for n, whose in limits), key=lambda limit: limit[0])
    if max_context is not None and max_context < 2:
        raise CheckpointError(f"--max-context {max_context} leaves no room for a prompt and an answer; give 2 or more.")
    if max_context is not None and max_context > limit:
        raise CheckpointError(f"--max-context {max_context} exceeds {limit}, the most {whose} serves. Give less.")
    largest = pair.drafter.block_size
    for size in block_sizes:
        if size < 2:
            raise CheckpointError(f"--block-size {size} is no block: it is the anchor and at least one draft, so >= 2.")
        if size > largest:
            raise CheckpointError(f"--block-size {size} exceeds {largest}, the block the drafter was trained for.")
    own = pair.target.stored_precision
    return PlanOptions(
        precision=precision or (own if own in ("fp16", "bf16") else "fp16"),
        table_precision=table_precision,
        max_context_tokens=max_context or min(DEFAULT_CONTEXT_TOKENS, limit),
        block_sizes=tuple(sorted(set(block_sizes))) or default_block_sizes(largest),
    )


def make_plan(pair: Pair, place: Place, options: PlanOptions) -> Plan:
    """Sums and times of a pair on a device."""
    run = run_items(pair, place, options)
    depth = options.max_context_tokens // 2
    plain, blocks = _times(pair, place.device, options, depth)
    return Plan(pair, place, options, run, build_items(pair, place, options), depth, plain, blocks)


def run_items(pair: Pair, place: Place, options: PlanOptions) -> tuple[MemoryItem, ...]:
    """What memory holds while the pair runs."""
    target, drafter, storage = pair.target, pair.drafter, options.storage
    capacity = formulas.capacity_tokens(options.max_context_tokens, options.block_sizes)
    _, held_again = formulas.held_bytes(target, drafter, storage)
    rows = [
        ("target weights", formulas.model_bytes(target, storage), EXACT),
        ("drafter weights", formulas.given_drafter_bytes(drafter, storage), EXACT),
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
    host = formulas.host_builder_bytes(pair.target, options.storage, options.block_sizes)
    peak = trial + (host if place.device.unified else 0)
    return tuple(MemoryItem(*row) for row in [("builder peak", peak, PREDICTED), *_fixed(place)])


def _scratch(pair: Pair, options: PlanOptions) -> int:
    capacity = formulas.capacity_tokens(options.max_context_tokens, options.block_sizes)
    return formulas.scratch_bytes(pair.target, pair.drafter, options.storage, capacity, max(options.block_sizes))


def _fixed(place: Place) -> list[tuple[str, int, str]]:
    return [
        ("CUDA context and libraries", formulas.RUNTIME_BYTES[place.device.unified], PREDICTED),
        ("kept for the system", place.system_bytes, PREDICTED),
    ]


def _times(pair: Pair, device: Device, options: PlanOptions, depth: int) -> tuple[float, tuple[BlockTime, ...]]:
    target, drafter, storage = pair.target, pair.drafter, options.storage
    plain = formulas.verify_s(device, target, storage, 1, depth)
    blocks = []
    for size in options.block_sizes:
        draft = formulas.draft_s(device, target, drafter, storage, size, depth)
        verify = formulas.verify_s(device, target, storage, size, depth)
        append = formulas.append_s(device, drafter, storage, size)
        cycle = draft + verify + append
        needed = formulas.needed_acceptance_length(cycle, plain)
        blocks.append(BlockTime(size, draft * 1e3, verify * 1e3, append * 1e3, cycle * 1e3, needed))
    return plain * 1e3, tuple(blocks)

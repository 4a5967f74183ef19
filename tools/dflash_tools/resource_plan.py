"""A plan: what a pair takes on a device, whether that fits, and what a cycle takes in time."""

from __future__ import annotations

import dataclasses

from dflash_tools import plan_formulas as formulas
from dflash_tools.device_table import Device
from dflash_tools.plan_obstacles import all_weights, find_obstacles
from dflash_tools.plan_options import PlanOptions
from dflash_tools.plan_sources import Pair
from dflash_tools.weight_bytes import device_drafter_bytes, device_target_bytes, held_bytes

EXACT, PREDICTED, READ = "exact", "predicted", "read on this device"


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
        return {form.kind for _, form in all_weights(self.pair, self.options)}

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


def make_plan(pair: Pair, place: Place, options: PlanOptions) -> Plan:
    """Sums and times of a pair on a device."""
    run = run_items(pair, place, options)
    depth = options.max_context_tokens // 2
    plain, blocks = _times(pair, place.device, options, depth)
    obstacles = find_obstacles(pair, place.device, options)
    return Plan(pair, place, options, run, build_items(pair, place, options), depth, plain, blocks, obstacles)


def run_items(pair: Pair, place: Place, options: PlanOptions) -> tuple[MemoryItem, ...]:
    """What memory holds while the pair runs."""
    target, drafter, storage, own = pair.target, pair.drafter, options.storage, options.drafter_storage
    capacity, item_bytes = options.capacity_rows, storage.item_bytes
    _, held_again = held_bytes(target, drafter, storage, own)
    engines = formulas.engine_bytes(target, drafter, options.block_sizes, options.layouts)
    drafter_kv = formulas.drafter_kv_bytes(drafter.body, options.max_context_tokens, options.block_sizes, item_bytes,
                                           prefill_chunk=formulas.PREFILL_CHUNK_TOKENS)  # fmt: skip
    rows = [
        ("target weights", device_target_bytes(target, storage), EXACT),
        ("drafter weights", device_drafter_bytes(drafter, own), EXACT),
        ("target KV cache", formulas.kv_bytes(target, capacity, item_bytes), EXACT),
        ("drafter KV cache", drafter_kv, EXACT),
        ("activations and scratch", _scratch(pair, options), PREDICTED),
        ("engines", engines + held_again, PREDICTED),
        *_fixed(place),
    ]
    if options.form == "primitive":
        new_rows = sum(formulas.kv_bytes(m, capacity - options.max_context_tokens, item_bytes)
                       for m in (target, drafter.body))  # fmt: skip
        rows.insert(4, ("rows a call hands back", new_rows, EXACT))
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
        pair.target, pair.drafter, options.storage, options.drafter_storage, options.block_sizes, options.layouts
    )


def _scratch(pair: Pair, options: PlanOptions) -> int:
    rows, largest = options.capacity_rows, max(options.block_sizes)
    return formulas.scratch_bytes(pair.target, pair.drafter, options.storage, rows, largest)


def _fixed(place: Place) -> list[tuple[str, int, str]]:
    return [
        ("CUDA context and libraries", formulas.RUNTIME_BYTES[place.device.unified], PREDICTED),
        ("kept for the system", place.system_bytes, PREDICTED),
    ]


def _times(pair: Pair, device: Device, options: PlanOptions, depth: int) -> tuple[float, tuple[BlockTime, ...]]:
    target, drafter, storage, own = pair.target, pair.drafter, options.storage, options.drafter_storage
    layouts = options.layouts
    plain = formulas.verify_s(device, target, storage, 1, depth, layouts)
    blocks = []
    for size in options.block_sizes:
        draft = formulas.draft_s(device, target, drafter, storage, own, size, depth, layouts)
        verify = formulas.verify_s(device, target, storage, size, depth, layouts)
        append = formulas.append_s(device, drafter, own, size)
        cycle = draft + verify + append
        needed = formulas.needed_acceptance_length(cycle, plain)
        blocks.append(BlockTime(size, draft * 1e3, verify * 1e3, append * 1e3, cycle * 1e3, needed))
    return plain * 1e3, tuple(blocks)

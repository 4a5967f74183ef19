"""What would fit where a plan does not: less context, smaller weights, another board."""

from __future__ import annotations

import dataclasses

from dflash_tools.device_table import DEVICES
from dflash_tools.plan_options import KEEP, PlanOptions
from dflash_tools.resource_plan import Plan, make_plan, place_on

LEAST_CONTEXT_TOKENS = 512
CONTEXT_STEP_TOKENS = 256
_SMALLER = (
    ("int8", KEEP, KEEP), ("int8", KEEP, "int8"), ("int4", KEEP, KEEP), ("int4", KEEP, "int4"),
    ("int4", "int8", "int4"), ("int4", "int4", "int4"),
)  # fmt: skip
"""Of the layers, the head and the drafter."""
_BITS = {KEEP: 16, "fp16": 16, "bf16": 16, "int8": 8, "fp8": 8, "int4": 4}


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A change that makes the pair fit."""

    what: str
    arguments: str
    """What to add to the command."""
    needed_bytes: int
    available_bytes: int


def propose(plan: Plan) -> list[Proposal]:
    """What fits, the smallest change first; nothing when the plan fits already.

    Less context alone, then smaller weights with as much context as they leave, then the smallest board or card on
    which the pair fits as it was asked for.
    """
    if plan.fits:
        return []
    found = [_with_largest_context(plan, plan.options, "a smaller context")]
    tried = [plan.options]
    for kinds in _SMALLER:
        options = _stored_as(plan, *kinds)
        if options not in tried and _is_smaller(options, plan.options):
            tried.append(options)
            found.append(_with_largest_context(plan, options, _named(options, plan.options)))
    return [proposal for proposal in (*found, _another_device(plan)) if proposal is not None]


def _stored_as(plan: Plan, layers: str, head: str, drafter: str) -> PlanOptions:
    """Other kinds of weights, where the checkpoints leave them open."""
    target, own = plan.pair.target, plan.pair.drafter
    kept = plan.options
    return dataclasses.replace(
        kept,
        precision=kept.precision if any(matrix.form for matrix in target.matrices) else layers,
        table_precision=kept.table_precision if target.head_form else head,
        drafter_precision=kept.drafter_precision if own.body.quantised_as or own.fuse.form else drafter,
    )


def _with_largest_context(plan: Plan, options: PlanOptions, what: str) -> Proposal | None:
    """The options with as much of the wanted context as fits, in steps; None where even the least does not."""
    wanted = options.max_context_tokens
    tries = [wanted, *range(wanted - wanted % CONTEXT_STEP_TOKENS, LEAST_CONTEXT_TOKENS - 1, -CONTEXT_STEP_TOKENS)]

    def at(tokens: int) -> Plan:
        return make_plan(plan.pair, plan.place, dataclasses.replace(options, max_context_tokens=tokens))

    low, high = 0, len(tries)  # memory never shrinks with context, so the first try that fits can be bisected
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if at(tries[middle]).fits else (middle + 1, high)
    if low == len(tries):
        return None
    fitting = at(tries[low])
    words = what if tries[low] == wanted else f"{what}: {tries[low]} tokens"
    if what != "a smaller context" and tries[low] != wanted:
        words = f"{what}, and a context of {tries[low]} tokens"
    return Proposal(words, _arguments(fitting.options, plan.options), fitting.needed_bytes, plan.place.available_bytes)


def _another_device(plan: Plan) -> Proposal | None:
    """The device of least memory, of the same kind if there is one, on which the pair fits as asked for."""
    unified = plan.place.device.unified
    for device in sorted(DEVICES.values(), key=lambda d: (d.unified is not unified, d.memory_bytes)):
        other = make_plan(plan.pair, place_on(device), plan.options)
        if other.fits:
            needed, available = other.needed_bytes, other.place.available_bytes
            return Proposal(f"another device: {device.label}", f"--device {device.name}", needed, available)
    return None


def _kinds(options: PlanOptions) -> tuple[str, str, str]:
    return options.precision, options.table_precision, options.drafter_precision


def _is_smaller(options: PlanOptions, than: PlanOptions) -> bool:
    """Nothing is stored in more bits."""
    return all(_BITS[now] <= _BITS[before] for now, before in zip(_kinds(options), _kinds(than), strict=True))


def _named(options: PlanOptions, asked: PlanOptions) -> str:
    words = [
        f"{what} in {now}"
        for what, now, before in zip(("weights", "head", "drafter"), _kinds(options), _kinds(asked), strict=True)
        if now != before
    ]
    return ", ".join(words)


def _arguments(options: PlanOptions, asked: PlanOptions) -> str:
    changed = [
        ("--precision", options.precision, asked.precision),
        ("--quantize-head", options.table_precision, asked.table_precision),
        ("--quantize-drafter", options.drafter_precision, asked.drafter_precision),
        ("--max-context", options.max_context_tokens, asked.max_context_tokens),
    ]
    return " ".join(f"{name} {value}" for name, value, before in changed if value != before)

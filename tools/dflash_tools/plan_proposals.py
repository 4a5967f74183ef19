"""What would fit where a plan does not: less context, smaller weights, another board."""

from __future__ import annotations

import dataclasses

from dflash_tools.device_table import DEVICES
from dflash_tools.resource_plan import Plan, PlanOptions, make_plan, place_on

LEAST_CONTEXT_TOKENS = 512
CONTEXT_STEP_TOKENS = 256
_SMALLER = (("int8", "16bit"), ("int4", "16bit"), ("int4", "int8"), ("int4", "int4"))
_BITS = {"16bit": 16, "fp16": 16, "bf16": 16, "int8": 8, "int4": 4}


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
    for precision, tables in _SMALLER:
        options = dataclasses.replace(plan.options, precision=precision, table_precision=tables)
        if _is_smaller(options, plan.options):
            found.append(_with_largest_context(plan, options, _named(precision, tables)))
    return [proposal for proposal in (*found, _another_device(plan)) if proposal is not None]


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


def _is_smaller(options: PlanOptions, than: PlanOptions) -> bool:
    now = (_BITS[options.precision], _BITS[options.table_precision])
    before = (_BITS[than.precision], _BITS[than.table_precision])
    return now != before and now[0] <= before[0] and now[1] <= before[1]


def _named(precision: str, tables: str) -> str:
    return f"weights in {precision}" if tables == "16bit" else f"weights in {precision}, head in {tables}"


def _arguments(options: PlanOptions, asked: PlanOptions) -> str:
    changed = [
        ("--precision", options.precision, asked.precision),
        ("--table-precision", options.table_precision, asked.table_precision),
        ("--max-context", options.max_context_tokens, asked.max_context_tokens),
    ]
    return " ".join(f"{name} {value}" for name, value, before in changed if value != before)

"""Level `graph`: every output of target, context and drafter over every call of the reference."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from dflash_runtime.bundle import CheckRow
from dflash_tools.graph_probe import GraphProbe
from dflash_tools.reference_calls import run_call
from dflash_tools.reference_file import Reference
from dflash_tools.reference_record import CONTEXT, DRAFTER, TARGET, Call
from dflash_tools.reference_tensors import Tensors, is_output
from dflash_tools.validate_comparison import Bounds, Difference, WorstRows, differences, values_at
from dflash_tools.validate_places import CAUSES, place_of
from dflash_tools.validate_verdict import Divergence, Verdict, judge

_ORDER = {TARGET: 0, CONTEXT: 1, "drafter": 2}


@dataclasses.dataclass(frozen=True)
class CallResult:
    """What one call of the reference gave on an engine."""

    number: int
    call: Call
    found: Tensors
    compared: list[Difference]
    kept_rows_changed: list[str]
    """Caches in which a row before the call's own is another one after it."""


def run_calls(probe: GraphProbe, reference: Reference, bounds: Bounds, sequence: int | None = None
              ) -> Iterator[CallResult]:
    """Runs the calls of a reference, or of one sequence of it, in their order."""
    before: int | None = None
    for number, call in enumerate(reference.facts.calls):
        taps = reference.arrays.get(f"text{call.text}.taps")
        if (sequence is not None and call.sequence != sequence) or (call.graph == CONTEXT and taps is None):
            continue
        if call.graph == DRAFTER and not probe.can_draft(call.rows):
            continue
        if call.sequence != before:
            probe.reset()
            before = call.sequence
        model = "target" if call.graph == TARGET else "drafter"
        kept = {name: rows[: call.position].copy() for name, rows in probe.cache_rows(model).items()}
        found = run_call(probe, call, taps)
        after = probe.cache_rows(model)
        same = {name: np.array_equal(after[name][: call.position], rows, equal_nan=True) for name, rows in kept.items()}
        changed = [name for name in kept if not same[name]]
        compared = differences(reference, number, found, bounds)
        if call.graph == DRAFTER and not probe.shows_block_rows:
            compared = [one for one in compared if not one.name.startswith("present.")]
        likeliest = reference.facts.pair.proposes_likeliest or call.graph == TARGET
        compared += _choices(call, found) if likeliest else []
        yield CallResult(number, call, found, compared, changed)


def _choices(call: Call, found: Tensors) -> list[Difference]:
    """The ids a graph chooses against its own logits: -1 where those are not finite."""
    ids, logits = ("token_ids", "logits") if call.graph == TARGET else ("draft_ids", "draft_logits")
    if ids not in found or logits not in found:
        return []
    finite = np.isfinite(found[logits]).all(-1)
    right = found[logits].argmax(-1) == found[ids][:, 0]
    wrong = np.where(finite, ~right, found[ids][:, 0] != -1) if call.graph == TARGET else finite & ~right
    return [Difference(ids, wrong.astype(np.float64), 0.0)]


def check_graphs(
    probe: GraphProbe, reference: Reference, bounds: Bounds, words: str = ""
) -> tuple[Verdict, CallResult | None]:
    """Compares every output of every call.

    Args:
        probe: The engine.
        reference: What is right.
        bounds: What is allowed in the engine's precision.
        words: What is special about the probe, behind each row's name.

    Returns:
        The verdict, and the first call that is wrong, for a closer look.
    """
    worst, bad, seen = WorstRows("graph"), list[CallResult](), set[str]()
    for result in run_calls(probe, reference, bounds):
        seen.add(result.call.graph)
        for one in result.compared:
            if is_output(one.name):
                worst.add(f"{result.call.graph} {_kind(one.name)}{words}", one.worst, one.allowed)
        worst.add(f"{result.call.graph} kept rows{words}", float(len(result.kept_rows_changed)), 0.0)
        if result.kept_rows_changed or any(one.is_wrong and is_output(one.name) for one in result.compared):
            bad.append(result)
    first = min(bad, key=lambda result: _ORDER[result.call.graph], default=None)
    calls = reference.facts.calls
    sequences, rows = len({call.sequence for call in calls}), [call.rows for call in calls]
    covered = f"{sequences} sequences of calls of {min(rows)} to {max(rows)} rows, rollbacks among them"
    seen_on = f"debug engine ({probe.name})" if words else "engine"
    found = None if first is None else first_divergence(first, reference, seen_on)
    unseen = [
        CheckRow("graph", kind, math.inf, 0.0, False, "no call of the reference is one this engine can make")
        for kind in dict.fromkeys(call.graph for call in calls) if kind not in seen
    ]  # fmt: skip
    return judge("graph", [*worst.rows(covered), *unseen], found), first


def _kind(name: str) -> str:
    if name.startswith("present."):
        return "keys" if name.endswith("key") else "values"
    return "taps" if name.startswith("taps.") else name


def first_divergence(result: CallResult, reference: Reference, seen_on: str) -> Divergence:
    """The first output of a call that is wrong, in the order of computation."""
    wrong = [one for one in result.compared if one.is_wrong and is_output(one.name)]
    if wrong:
        return describe(result, wrong[0], reference, seen_on)
    name = result.kept_rows_changed[0]
    place = place_of(name)
    return Divergence(
        result.call.graph, name, place.layer, "cache", result.call.words, "other rows", "the rows written before",
        1.0, 0.0, seen_on, CAUSES["cache"],
    )  # fmt: skip


def describe(
    result: CallResult, one: Difference, reference: Reference, seen_on: str, part: str | None = None
) -> Divergence:
    """A tensor that is wrong, with place and values."""
    taps = reference.facts.pair.tap_layer_ids
    place, row = place_of(one.name, taps), one.first_row
    if one.name not in result.found:
        found, expected = "missing", "an output of the graph"
    elif one.name.endswith("_ids"):
        logits = result.found["logits" if one.name == "token_ids" else "draft_logits"]
        key = f"{result.number}/{one.name}"
        right = reference.arrays[key][row, 0] if key in reference.arrays else logits[row].argmax()
        found, expected = str(int(result.found[one.name][row, 0])), str(int(right))
    else:
        found, expected = values_at(reference, f"{result.number}/{one.name}", one.name, result.found[one.name], row)
    where = f"{result.call.words}, row {row} (position {result.call.position + row})"
    cause = CAUSES.get(part or place.part, "unknown")
    if not np.isfinite(one.worst) and one.name in result.found and not np.isfinite(result.found[one.name][row]).all():
        cause = "a value that the precision cannot hold, or a NaN in a weight or a cache row"
    if place.part == "tap":
        cause = _tap_of(result, one, reference) or cause
    return Divergence(
        result.call.graph, one.name, place.layer, part or place.part, where, found, expected, one.worst, one.allowed,
        seen_on, cause,
    )  # fmt: skip


def _tap_of(result: CallResult, one: Difference, reference: Reference) -> str | None:
    """Which layer's output a wrong tap is, if it is one."""
    for name in reference.facts.tensors[result.number]:
        if name.startswith("hidden_states."):
            rows = reference.row_deviations(f"{result.number}/{name}", name, result.found[one.name])
            if rows.max(initial=0.0) <= one.allowed:
                layer = int(name.rpartition(".")[2]) - 1
                return f"this tap is the output of layer {layer}: taps in another order, or layer ids off by one"
    return None

"""The first wrong tensor inside a graph: the same calls on debug engines, inner tensors against the reference's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir

from dflash_engines.portable_graph import load_portable
from dflash_runtime.bundle import Bundle
from dflash_tools.debug_graphs import PORTABLE, ancestors, inner_values, open_debug_probe
from dflash_tools.reference_calls import capacity_rows
from dflash_tools.reference_file import Reference
from dflash_tools.reference_record import CONTEXT, DRAFTER, INT8_PRODUCTS, TARGET
from dflash_tools.reference_tensors import is_output
from dflash_tools.validate_comparison import Bounds, Difference
from dflash_tools.validate_graph import CallResult, check_graphs, describe, run_calls
from dflash_tools.validate_places import place_of
from dflash_tools.validate_verdict import Divergence, Verdict

_DEBUG_FORMS = ("ort-cpu",)
"""Backends whose lowered graphs ONNX Runtime's CPU executes as they are."""


def look_inside(bundle: Bundle, reference: Reference, backend: str, precision: str, bad: CallResult
                ) -> tuple[Divergence | None, str]:
    """Looks for the first inner tensor behind an output that is wrong.

    Args:
        bundle: What is validated.
        reference: What is right.
        backend: Whose engine showed the fault.
        precision: What that engine computes in.
        bad: The first call that is wrong.

    Returns:
        The divergence, None where no debug engine shows the fault, and which of them were asked, in words.
    """
    precision = "fp32" if precision == INT8_PRODUCTS else precision  # debug engines leave that rounding out
    bounds, asked, exact = Bounds(reference, precision), [], precision == "fp32"
    rows = capacity_rows(reference.facts.calls, max(bundle.manifest.block_sizes))
    for form in (PORTABLE, *(one for one in _DEBUG_FORMS if one == backend)):
        kinds = (TARGET,) if bad.call.graph == TARGET else (CONTEXT, DRAFTER)
        probe = open_debug_probe(bundle, form, rows, exact=exact, kinds=kinds)
        if probe.precision != precision:
            continue
        asked.append(probe.name)
        calls = run_calls(probe, reference, bounds, bad.call.sequence)
        seen = next(result for result in calls if result.number == bad.number)
        if any(one.is_wrong and is_output(one.name) for one in seen.compared):
            model = load_portable(bundle, bundle.manifest.graph_files()[bad.call.graph])  # type: ignore[index]
            found = _first_inside(seen, reference, model, f"debug engine ({probe.name})")
            return _of_quantized(found, bundle), ", ".join(asked)
    return None, ", ".join(asked)


def _of_quantized(found: Divergence, bundle: Bundle) -> Divergence:
    """The same with what else makes the result of a quantised weight wrong."""
    own, head = "drafter.lm_head.weight", bundle.manifest.target.head_weight
    if found.tensor == "draft_logits" and own in bundle.manifest.weights:
        head = own
    weight = head if found.tensor.endswith("logits") else f"{found.tensor}.weight"
    if weight not in bundle.manifest.quantized:
        return found
    integers = "how its integers are read: a scale, a zero point, the order of nibbles, rows or groups"
    return dataclasses.replace(found, cause=f"{found.cause}; {weight} is quantised: {integers}")


def check_without_rounding(bundle: Bundle, backend: str, reference: Reference) -> tuple[Verdict, CallResult | None]:
    """Level `graph` on an engine's own graphs whose products with quantised weights compute in fp32: to 1e-4.

    Args:
        bundle: What is validated.
        backend: One whose graphs ONNX Runtime's CPU executes.
        reference: What is right.
    """
    rows = capacity_rows(reference.facts.calls, max(bundle.manifest.block_sizes))
    probe = open_debug_probe(bundle, backend, rows, inner=False, exact=True)
    return check_graphs(probe, reference, Bounds(reference, "fp32"), ", activations in fp32")


def _first_inside(seen: CallResult, reference: Reference, model: ir.Model, seen_on: str) -> Divergence:
    """The first wrong tensor that wrong outputs are computed from and no right output is."""
    outputs = [one for one in seen.compared if is_output(one.name)]
    first = next(one for one in outputs if one.is_wrong)
    taps = reference.facts.pair.tap_layer_ids
    good = ancestors(model, _values([one for one in outputs if not one.is_wrong], taps))
    behind = ancestors(model, _values([first], taps))
    # The residual stream is the same thing on both sides; norms hide its scale from outputs that are right.
    names = {name: str(value.name) for name, value in inner_values(model).items()}
    trusted = {name for name, value in names.items() if value in behind - good or name.startswith("hidden_states.")}
    wrong = [one for one in seen.compared if one.is_wrong and one.name in trusted and names[one.name] in behind]
    if wrong:
        return describe(seen, wrong[0], reference, seen_on)
    return describe(seen, first, reference, seen_on, _rope(seen.compared, first))


def _values(outputs: Sequence[Difference], taps: Sequence[int]) -> list[str]:
    """Names of values; a tap is the layer output it hands out, ids are left out as they follow from logits."""
    names = [one.name for one in outputs if not one.name.endswith("_ids")]
    return [f"hidden_states.{taps[int(n[5:])] + 1}" if n.startswith("taps.") else n for n in names]


def _rope(compared: Sequence[Difference], first: Difference) -> str | None:
    """Keys that are wrong although their projection and norm are right were rotated wrongly."""
    if not (first.name.startswith("present.") and first.name.endswith(".key")):
        return None
    layer = place_of(first.name).layer
    made = [one for one in compared if one.name.rpartition(".")[2] in ("k_proj", "k_norm")]
    made = [one for one in made if place_of(one.name).layer == layer]
    return "rope" if made and not any(one.is_wrong for one in made) else None

"""The parity gate: portable graphs against PyTorch, every output and every KV row, with a table as result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
import onnx_ir as ir

from dflash_export.deviation import Worst, deviation
from dflash_export.evidence import TargetEvidence
from dflash_export.graph_files import load_graph
from dflash_export.graph_runner import Array, GraphRunner
from dflash_export.reference_run import StepOutputs
from dflash_export.weight_values import weights_as_float32
from dflash_runtime.bundle import CheckRow, GraphFacts, GraphKind, Manifest
from dflash_runtime.errors import ParityError

EXACT_TOLERANCE = 1e-4
"""fp32 graph against fp32 PyTorch: measured 1.2e-5 on SmolLM2-135M, at most 3.1e-5 over all exact architectures."""
ROUNDED_FACTOR = 3.0
"""A half-precision graph may deviate from fp32 this many times as far as PyTorch itself does in that dtype."""

GraphEdit = Callable[[ir.Model], ir.Model]


@dataclasses.dataclass(frozen=True)
class PrecisionPasses:
    """How a half-precision graph is made runnable where ONNX Runtime has no half-precision kernels."""

    to_fp32: GraphEdit
    """Everything in fp32; weights are bound by name."""
    emulate_half: GraphEdit
    """Every result rounded to the graph's own dtype."""
    lower: GraphEdit | None = None
    """The lowering of the backend that is built for, None for portable graphs only. Used on parts of a target that
    cannot be run whole; a whole one is compared after it was written."""
    lower_drafter: Callable[[ir.Model, GraphKind], ir.Model] | None = None
    """The same for the drafter's graphs."""
    keep_in_fp32: Callable[[ir.Model, Collection[str]], ir.Model] | None = None
    """Puts the named half-precision values of a graph in fp32; None leaves the fp16 guard out."""


def check_target(root: Path, manifest: Manifest, evidence: TargetEvidence, passes: PrecisionPasses) -> list[CheckRow]:
    """Runs `target.onnx` over the evidence's calls and compares everything it gives.

    Args:
        root: The bundle.
        manifest: Its manifest.
        evidence: PyTorch's outputs.
        passes: Used when the bundle is in half precision.

    Returns:
        Rows of stage `portable` (fp32, tight), for half precision also `precision`, and `tokens`.
    """
    facts = manifest.target.graph
    model = load_graph(root, manifest.weights, facts.file)
    capacity = max(s.position + len(s.ids) for s in evidence.steps) + 8
    capacity = max(capacity, *(len(p) + len(c) for p, c in zip(evidence.prompts, evidence.continuations, strict=True)))
    covered = "calls (rows before, new): " + ", ".join(f"({s.position}, {len(s.ids)})" for s in evidence.steps)
    if evidence.rounded is None:
        runner = GraphRunner(serialise(model), root, facts, capacity)
    else:
        weights = weights_as_float32(root, manifest, model)
        runner = GraphRunner(serialise(passes.to_fp32(model)), root, facts, capacity, weights)
    worst = compare_target(runner, manifest, evidence, evidence.exact)
    rows = worst.rows("portable", EXACT_TOLERANCE, covered)
    rows.append(_check_greedy(runner, evidence))
    if evidence.rounded is not None:
        del runner
        rows += _check_rounded(root, manifest, facts, evidence, passes, capacity, covered)
    return rows


def _check_rounded(
    root: Path,
    manifest: Manifest,
    facts: GraphFacts,
    evidence: TargetEvidence,
    passes: PrecisionPasses,
    capacity: int,
    covered: str,
) -> list[CheckRow]:
    """The dtype plan: the graph in its own precision is as near to fp32 as PyTorch in that precision is."""
    assert evidence.rounded is not None
    model = passes.emulate_half(load_graph(root, manifest.weights, facts.file))
    runner = GraphRunner(serialise(model), root, facts, capacity)
    worst = compare_target(runner, manifest, evidence, evidence.exact, tokens=False)
    own = Worst()
    for rounded, exact in zip(evidence.rounded, evidence.exact, strict=True):
        for name, found, expected in _pairs(manifest, evidence, rounded, exact):
            own.add(name, deviation(found, expected))
    tolerances = {name: ROUNDED_FACTOR * value + EXACT_TOLERANCE for name, value in own.by_tensor.items()}
    return worst.rows("precision", tolerances, f"{manifest.precision}, {covered}")


def _pairs(
    manifest: Manifest, evidence: TargetEvidence, one: StepOutputs, two: StepOutputs
) -> list[tuple[str, Array, Array]]:
    ids = manifest.taps.layer_ids
    pairs = [("logits", one.logits, two.logits), ("taps", evidence.taps(one, ids), evidence.taps(two, ids))]
    for i, (key, value) in enumerate(zip(one.keys, one.values, strict=True)):
        pairs += [("keys", key, two.keys[i]), ("values", value, two.values[i])]
    return pairs


def compare_target(
    runner: GraphRunner, manifest: Manifest, evidence: TargetEvidence, expected: list[StepOutputs], tokens: bool = True
) -> Worst:
    """Worst deviation of each kind of output over all calls."""
    worst = Worst()
    runner.reset()
    for step, reference in zip(evidence.steps, expected, strict=True):
        S = len(step.ids)
        outputs = runner.run(
            input_ids=np.array([step.ids]), position=np.array([step.position]), logit_rows=np.arange(S)
        )
        length = step.position + S
        state = [outputs[t.output][0, :, :length] for t in manifest.target.graph.state]
        found = StepOutputs(outputs["logits"][0], reference.hidden, state[0::2], state[1::2])
        for name, one, two in _pairs(manifest, evidence, found, reference):
            worst.add(name, deviation(outputs["taps"][0] if name == "taps" else one, two))
        if tokens:
            worst.add("token_ids", float((outputs["token_ids"][0] != reference.logits.argmax(-1)).sum()))
    return worst


def _check_greedy(runner: GraphRunner, evidence: TargetEvidence) -> CheckRow:
    differing = 0
    for prompt, expected in zip(evidence.prompts, evidence.continuations, strict=True):
        runner.reset()
        ids, position = list(prompt), 0
        found: list[int] = []
        while len(found) < len(expected):
            outputs = runner.run(
                input_ids=np.array([ids]), position=np.array([position]), logit_rows=np.array([len(ids) - 1])
            )
            position += len(ids)
            ids = [int(outputs["token_ids"][0, 0])]
            found += ids
        differing += sum(a != b for a, b in zip(found, expected, strict=True))
    count = sum(len(c) for c in evidence.continuations)
    return CheckRow(
        "portable",
        "greedy tokens",
        float(differing),
        0.0,
        differing == 0,
        f"{count} tokens after {len(evidence.prompts)} prompts",
    )


def serialise(model: ir.Model) -> bytes:
    """A graph as bytes; weights stay outside."""
    data: bytes = ir.to_proto(model).SerializeToString()
    return data


def require_passed(rows: list[CheckRow]) -> None:
    """Ends a build whose gate found something.

    Raises:
        ParityError: nothing was checked, or a row failed; the first failing tensors are named with both values.
    """
    if not rows:
        raise ParityError("nothing was checked, so nothing is proven; the build stops.")
    failed = [row for row in rows if not row.passed]
    if failed:
        details = "; ".join(
            f"{row.stage} {row.tensor}: {row.worst:.3g} where {row.tolerance:.3g} is allowed" for row in failed[:4]
        )
        overflow = [row.tensor for row in failed if row.stage == "precision" and not np.isfinite(row.worst)]
        if overflow:
            raise ParityError(
                f"in this precision the model's {', '.join(overflow)} are not finite: its values exceed what the dtype "
                "can hold, so it would speak nonsense. Build with --precision bf16 or fp32; nothing was written."
            )
        raise ParityError(
            f"{len(failed)} of {len(rows)} parity checks failed: {details}. The bundle would not say what the "
            "checkpoint says, so it was not written."
        )

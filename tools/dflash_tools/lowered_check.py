"""Compares what backends are given with the portable graphs, without torch: every output, every KV row."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from dflash_engines.fused_form import lower_fused
from dflash_engines.half_precision import to_fp32
from dflash_engines.ort_cpu import DEFAULT_ACTIVATIONS, lower_model
from dflash_engines.passes.flat_matmul import FlatMatMulPass
from dflash_engines.passes.quantized_matmul import ActivationPrecision
from dflash_engines.portable_graph import load_portable
from dflash_export.deviation import Array, Worst, deviation, mean_deviation
from dflash_export.graph_runner import GraphRunner
from dflash_runtime.bundle import Bundle, CheckRow, GraphFacts, GraphKind
from dflash_runtime.engine_record import HostEngineRecord, engine_folder, open_engine
from dflash_runtime.weights import STORED, MappedWeights
from dflash_tools.int8_product_graphs import keep_activations, round_activations
from dflash_tools.network_weights import signed_weights
from dflash_tools.validate_comparison import ROUNDED_FACTOR, WorstRows

TOLERANCE = 1e-4
"""fp32 against fp32; other kernels sum in another order: measured 1.2e-5 on SmolLM2-135M."""
_SEED = 77


class Call(NamedTuple):
    """One run of a graph."""

    position: int
    inputs: dict[str, Array]
    rows: int


def check_lowered(bundle: Bundle, backend: str) -> list[CheckRow]:
    """Runs portable and lowered graphs over the same calls: prefill, filled cache, rollback, single rows.

    Args:
        bundle: With engines for `backend`.
        backend: `ort-cpu`.

    Returns:
        Rows of stage `lowered`. Where weights are quantised, these are of the engine's graphs with activations kept in
        fp32, so that whatever they read wrongly is further off than sums in another order; rows of stage
        `int8 products` are of the engine as it runs, which may lose a few times what the same rounding costs the
        portable graphs on the same calls.
    """
    rows = _compare(bundle, "lowered", lambda facts, calls: _open_exactly(bundle, facts, backend, calls))
    return rows + (_compare_rounded(bundle, backend) if bundle.manifest.quantized else [])


def allowed_rounding(own: float) -> float:
    """Deviation that an engine which rounds is allowed: by what the same rounding costs where it is known to be right.

    Args:
        own: That cost; where it is not finite nothing is allowed, as it proves nothing.
    """
    return ROUNDED_FACTOR * own + TOLERANCE if np.isfinite(own) else 0.0


def check_fused(bundle: Bundle) -> list[CheckRow]:
    """The same for the networks TensorRT engines are built from, computed in fp32 by ONNX Runtime.

    Args:
        bundle: In fp16 or bf16; no engines are needed.

    Returns:
        Rows of stage `network`.
    """
    return _compare(bundle, "network", lambda facts, calls: _fused(bundle, facts, calls))


def _compare(
    bundle: Bundle, stage: str, open_other: Callable[[GraphFacts, list[Call]], GraphRunner]
) -> list[CheckRow]:
    rows = []
    for kind, facts in _graphs(bundle):
        calls = list(_calls(bundle, kind))
        expected = _run(open_portable(bundle, facts, calls), calls)
        found = _run(open_other(facts, calls), calls)
        worst = Worst()
        for one, two in zip(found, expected, strict=True):
            for name, array in two.items():
                if array.dtype == np.int64:
                    worst.add(f"{kind} {name}", float((one[name] != array).sum()))
                else:
                    worst.add(f"{kind} {name}", deviation(one[name], array))
        rows += _merged(worst, kind).rows(stage, TOLERANCE, _covered(calls))
    return rows


def _compare_rounded(bundle: Bundle, backend: str) -> list[CheckRow]:
    """The engine as it runs. Token ids are left out: rounding may pick another one."""
    rows = []
    for kind, facts in _graphs(bundle):
        calls = list(_calls(bundle, kind))
        exact = _run(open_portable(bundle, facts, calls), calls)
        own = _run(open_portable(bundle, facts, calls, rounds=True), calls)
        found = _run(open_lowered(bundle, facts, backend, calls), calls)
        worst = WorstRows("int8 products")
        for name in [name for name, array in exact[0].items() if array.dtype != np.int64]:
            cost, lost = (
                max(mean_deviation(one[name], right[name]) for one, right in zip(results, exact, strict=True))
                for results in (own, found)
            )
            worst.add(f"{kind} {'cache' if name.startswith('present.') else name}", lost, allowed_rounding(cost))
        rows += worst.rows(_covered(calls))
    return rows


def _graphs(bundle: Bundle) -> list[tuple[str, GraphFacts]]:
    manifest = bundle.manifest
    graphs = [("target", manifest.target.graph)]
    if manifest.drafter is not None:
        graphs += [("drafter_context", manifest.drafter.context_graph), ("drafter", manifest.drafter.graph)]
    return graphs


def _covered(calls: list[Call]) -> str:
    return "calls (rows before, new): " + ", ".join(f"({c.position}, {c.rows})" for c in calls)


def _merged(worst: Worst, kind: str) -> Worst:
    """All caches of a graph in one line."""
    merged = Worst()
    for name, value in worst.by_tensor.items():
        merged.add(f"{kind} cache" if " present." in name else name, value)
    return merged


def _calls(bundle: Bundle, kind: str) -> Iterator[Call]:
    manifest = bundle.manifest
    rng, noise = random.Random(_SEED), np.random.default_rng(_SEED)
    limit = manifest.max_context_tokens
    windows = [t.window_tokens for t in manifest.target.graph.state if t.window_tokens and t.window_tokens <= 512]
    start = min(max([11, *(w - 2 for w in windows)]), max(1, limit - 24))
    for position, rows in ((0, start), (start, 4), (start + 1, 16), (start + 6, 1), (start + 4, 8)):
        if position + rows > limit:
            continue
        place = {"position": np.array([position], dtype=np.int64)}
        if kind == "drafter_context":
            width = int(next(t.shape[-1] for t in manifest.target.graph.outputs if t.name == "taps"))
            taps = noise.standard_normal((1, rows, width), dtype=np.float32)
            yield Call(position, {"taps": taps, **place}, rows)
            continue
        if kind == "drafter" and rows < 2:
            continue
        ids = np.array([[rng.randrange(manifest.target.vocab_size) for _ in range(rows)]], dtype=np.int64)
        if kind == "drafter":
            assert manifest.drafter is not None
            ids[0, 1:] = manifest.drafter.mask_token_id
            yield Call(position, {"input_ids": ids, **place}, rows)
        else:
            yield Call(position, {"input_ids": ids, **place, "logit_rows": np.arange(rows)}, rows)


def _run(runner: GraphRunner, calls: list[Call]) -> list[dict[str, Array]]:
    """Outputs of every call; a cache is cut to the rows written by the end of its call."""
    results = []
    state = {tensor.output for tensor in runner.facts.state}
    for call in calls:
        outputs = runner.run(**call.inputs)
        end = call.position + call.rows
        results.append({n: a[:, :, :end].copy() if n in state else a.copy() for n, a in outputs.items()})
    return results


def _capacity(calls: list[Call]) -> int:
    return max(call.position + call.rows for call in calls) + 4


def _weights(bundle: Bundle, model: ir.Model) -> dict[str, Array] | None:
    if bundle.manifest.precision == "fp32":
        return None
    mapped = MappedWeights(bundle)
    floats = {name for name, entry in bundle.manifest.weights.items() if entry.dtype in STORED}
    return {n: mapped.float32(n) for n in model.graph.initializers if n in floats}


def open_portable(bundle: Bundle, facts: GraphFacts, calls: list[Call], *, rounds: bool = False) -> GraphRunner:
    """A portable graph in fp32; `rounds`: what its quantised products are given is rounded as int8 kernels do."""
    model = load_portable(bundle, facts.file)
    if bundle.manifest.precision != "fp32":
        model = to_fp32(model)
    if rounds:
        round_activations(model)
    return _open(bundle, model, facts, calls)


def open_lowered(bundle: Bundle, facts: GraphFacts, backend: str, calls: list[Call]) -> GraphRunner:
    """The engine's graph; one whose caches are rings with caches of the whole context, rings have their own check."""
    return _open(bundle, _engine_graph(bundle, facts, backend), facts, calls)


def _open_exactly(bundle: Bundle, facts: GraphFacts, backend: str, calls: list[Call]) -> GraphRunner:
    model = _engine_graph(bundle, facts, backend)
    keep_activations(model)
    return _open(bundle, model, facts, calls)


def _engine_graph(bundle: Bundle, facts: GraphFacts, backend: str) -> ir.Model:
    record = open_engine(bundle, backend)
    if any(tensor.input in record.rings for tensor in facts.state) and facts is not bundle.manifest.target.graph:
        return lowered_without_rings(bundle, facts, record)
    return ir.load(engine_folder(bundle, backend) / facts.file)


def lowered_without_rings(
    bundle: Bundle, facts: GraphFacts, record: HostEngineRecord, *, exact: bool = False
) -> ir.Model:
    """A graph lowered as for an engine, all its caches as long as the context; `exact` keeps activations in fp32."""
    exact = exact or record.versions.get("activations") == "fp32"
    chosen: ActivationPrecision = "fp32" if exact else DEFAULT_ACTIVATIONS
    return lower_model(load_portable(bundle, facts.file), kind_of(bundle, facts), activations=chosen)


def kind_of(bundle: Bundle, facts: GraphFacts) -> GraphKind:
    """Which of the portable graphs it is."""
    return next(kind for kind, file in bundle.manifest.graph_files().items() if file == facts.file)


def _fused(bundle: Bundle, facts: GraphFacts, calls: list[Call]) -> GraphRunner:
    portable = load_portable(bundle, facts.file)
    with signed_weights(bundle, portable) as weights:
        model = lower_fused(portable)
        FlatMatMulPass()(model)
        return _open(bundle, to_fp32(model), facts, calls, weights)


def _open(
    bundle: Bundle, model: ir.Model, facts: GraphFacts, calls: list[Call], given: dict[str, Array] | None = None
) -> GraphRunner:
    return open_graph(bundle, model, facts, _capacity(calls), given)


def open_graph(
    bundle: Bundle, model: ir.Model, facts: GraphFacts, capacity_rows: int, given: dict[str, Array] | None = None
) -> GraphRunner:
    """A graph of fp32 interface with caches of so many rows; `given` are weights in another form than the bundle's."""
    data: bytes = ir.to_proto(model).SerializeToString()
    weights = {**(_weights(bundle, model) or {}), **(given or {})}
    return GraphRunner(data, bundle.path.resolve(), facts, capacity_rows, weights)

"""Compares what backends are given with the portable graphs, without torch: every output, every KV row."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
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
from dflash_export.quality import perplexity, perplexity_row, text_windows
from dflash_runtime.bundle import Bundle, CheckRow, GraphFacts, GraphKind
from dflash_runtime.engine_record import HostEngineRecord, engine_folder, open_engine
from dflash_runtime.errors import BundleError
from dflash_runtime.weights import STORED, MappedWeights
from dflash_tools.network_weights import signed_weights

TOLERANCE = 1e-4
"""fp32 against fp32; other kernels sum in another order: measured 1.2e-5 on SmolLM2-135M."""
ROUNDED_TOLERANCE = 0.3
"""For products that round activations to int8, beside the portable graph, root mean square: measured 0.06 and less on
SmolLM2-135M. A wrong scale or block is further off; what rounding costs a user is the perplexity of the engine."""
_SEED = 77


class _Call(NamedTuple):
    position: int
    inputs: dict[str, Array]
    rows: int


def check_lowered(bundle: Bundle, backend: str) -> list[CheckRow]:
    """Runs portable and lowered graphs over the same calls: prefill, filled cache, rollback, single rows.

    Args:
        bundle: With engines for `backend`.
        backend: `ort-cpu`.

    Returns:
        Rows of stage `lowered`. Where weights are quantised, these are of graphs lowered in the same way whose
        activations stay in fp32; rows of stage `int8 products` then compare the engine's own.
    """
    if not bundle.manifest.quantized:
        return _compare(bundle, "lowered", lambda facts, calls: _lowered(bundle, facts, backend, calls))
    rows = _compare(bundle, "lowered", lambda facts, calls: _lowered_exactly(bundle, facts, calls))
    return rows + _compare(
        bundle, "int8 products", lambda facts, calls: _lowered(bundle, facts, backend, calls), ROUNDED_TOLERANCE
    )


def check_perplexity(bundle: Bundle, backend: str, original: float) -> CheckRow:
    """Perplexity of the engine itself on the fixed text of the build.

    Args:
        bundle: With engines for `backend` and a tokenizer.
        backend: `ort-cpu`.
        original: Perplexity of the original checkpoint.
    """
    found, count = engine_perplexity(bundle, backend)
    return perplexity_row(f"perplexity {backend}", original, found, count, "as the engine runs")


def engine_perplexity(bundle: Bundle, backend: str) -> tuple[float, int]:
    """The same as a number, and the tokens of the text.

    Raises:
        BundleError: the bundle has no tokenizer for its vocabulary, so the text cannot be put to it.
    """
    target, context = bundle.manifest.target, bundle.manifest.max_context_tokens
    windows = text_windows(bundle.path / "tokenizer" / "tokenizer.json", target.vocab_size, context)
    if not windows:
        raise BundleError(f"{bundle.path} has no tokenizer for its vocabulary; build it from a checkpoint with one.")
    longest = max(len(window) for window in windows)
    runner = _lowered(bundle, target.graph, backend, [_Call(0, {}, longest)])

    def logits(ids: Sequence[int], position: int) -> Array:
        place = {"position": np.array([position]), "logit_rows": np.arange(len(ids))}
        found: Array = runner.run(input_ids=np.array([ids]), **place)["logits"][0]
        return found

    return perplexity(windows, logits), sum(len(window) for window in windows)


def exact_logits(bundle: Bundle, most_tokens: int) -> Callable[[Sequence[int]], Array]:
    """The target lowered as for an engine, activations in fp32: token ids -> logits [n, V] from an empty cache.

    Args:
        bundle: The bundle.
        most_tokens: Of any text that is asked for.
    """
    runner = _lowered_exactly(bundle, bundle.manifest.target.graph, [_Call(0, {}, most_tokens)])

    def logits(ids: Sequence[int]) -> Array:
        place = {"position": np.array([0]), "logit_rows": np.arange(len(ids))}
        found: Array = runner.run(input_ids=np.array([ids]), **place)["logits"][0]
        return found.copy()

    return logits


def check_fused(bundle: Bundle) -> list[CheckRow]:
    """The same for the networks TensorRT engines are built from, computed in fp32 by ONNX Runtime.

    Args:
        bundle: In fp16 or bf16; no engines are needed.

    Returns:
        Rows of stage `network`.
    """
    return _compare(bundle, "network", lambda facts, calls: _fused(bundle, facts, calls))


def _compare(
    bundle: Bundle,
    stage: str,
    open_other: Callable[[GraphFacts, list[_Call]], GraphRunner],
    tolerance: float = TOLERANCE,
) -> list[CheckRow]:
    manifest, exact = bundle.manifest, tolerance == TOLERANCE
    measure = deviation if exact else mean_deviation
    graphs: list[tuple[str, GraphFacts]] = [("target", manifest.target.graph)]
    if manifest.drafter is not None:
        graphs += [("drafter_context", manifest.drafter.context_graph), ("drafter", manifest.drafter.graph)]
    rows = []
    for kind, facts in graphs:
        calls = list(_calls(bundle, kind))
        expected = _run(_portable(bundle, facts, calls), calls)
        found = _run(open_other(facts, calls), calls)
        worst = Worst()
        for one, two in zip(found, expected, strict=True):
            for name, array in two.items():
                if array.dtype == np.int64 and not exact:
                    continue  # rounding may pick another token
                if array.dtype == np.int64:
                    worst.add(f"{kind} {name}", float((one[name] != array).sum()))
                else:
                    worst.add(f"{kind} {name}", measure(one[name], array))
        covered = "calls (rows before, new): " + ", ".join(f"({c.position}, {c.rows})" for c in calls)
        rows += _merged(worst, kind).rows(stage, tolerance, covered)
    return rows


def _merged(worst: Worst, kind: str) -> Worst:
    """All caches of a graph in one line."""
    merged = Worst()
    for name, value in worst.by_tensor.items():
        merged.add(f"{kind} cache" if " present." in name else name, value)
    return merged


def _calls(bundle: Bundle, kind: str) -> Iterator[_Call]:
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
            yield _Call(position, {"taps": taps, **place}, rows)
            continue
        if kind == "drafter" and rows < 2:
            continue
        ids = np.array([[rng.randrange(manifest.target.vocab_size) for _ in range(rows)]], dtype=np.int64)
        if kind == "drafter":
            assert manifest.drafter is not None
            ids[0, 1:] = manifest.drafter.mask_token_id
            yield _Call(position, {"input_ids": ids, **place}, rows)
        else:
            yield _Call(position, {"input_ids": ids, **place, "logit_rows": np.arange(rows)}, rows)


def _run(runner: GraphRunner, calls: list[_Call]) -> list[dict[str, Array]]:
    """Outputs of every call; a cache is cut to the rows written by the end of its call."""
    results = []
    state = {tensor.output for tensor in runner.facts.state}
    for call in calls:
        outputs = runner.run(**call.inputs)
        end = call.position + call.rows
        results.append({n: a[:, :, :end].copy() if n in state else a.copy() for n, a in outputs.items()})
    return results


def _capacity(calls: list[_Call]) -> int:
    return max(call.position + call.rows for call in calls) + 4


def _weights(bundle: Bundle, model: ir.Model) -> dict[str, Array] | None:
    if bundle.manifest.precision == "fp32":
        return None
    mapped = MappedWeights(bundle)
    floats = {name for name, entry in bundle.manifest.weights.items() if entry.dtype in STORED}
    return {n: mapped.float32(n) for n in model.graph.initializers if n in floats}


def _portable(bundle: Bundle, facts: GraphFacts, calls: list[_Call]) -> GraphRunner:
    model = load_portable(bundle, facts.file)
    if bundle.manifest.precision != "fp32":
        model = to_fp32(model)
    return _open(bundle, model, facts, calls)


def _lowered(bundle: Bundle, facts: GraphFacts, backend: str, calls: list[_Call]) -> GraphRunner:
    """The engine's graph; one whose caches are rings with caches of the whole context, rings have their own check."""
    record = open_engine(bundle, backend)
    if any(tensor.input in record.rings for tensor in facts.state) and facts is not bundle.manifest.target.graph:
        return _open(bundle, lowered_without_rings(bundle, facts, record), facts, calls)
    return _open(bundle, ir.load(engine_folder(bundle, backend) / facts.file), facts, calls)


def lowered_without_rings(
    bundle: Bundle, facts: GraphFacts, record: HostEngineRecord, *, exact: bool = False
) -> ir.Model:
    """A graph lowered as for an engine, all its caches as long as the context; `exact` keeps activations in fp32."""
    exact = exact or record.versions.get("activations") == "fp32"
    chosen: ActivationPrecision = "fp32" if exact else DEFAULT_ACTIVATIONS
    return lower_model(load_portable(bundle, facts.file), kind_of(bundle, facts), activations=chosen)


def _lowered_exactly(bundle: Bundle, facts: GraphFacts, calls: list[_Call]) -> GraphRunner:
    model = lower_model(load_portable(bundle, facts.file), kind_of(bundle, facts), activations="fp32")
    return _open(bundle, model, facts, calls)


def kind_of(bundle: Bundle, facts: GraphFacts) -> GraphKind:
    """Which of the portable graphs it is."""
    return next(kind for kind, file in bundle.manifest.graph_files().items() if file == facts.file)


def _fused(bundle: Bundle, facts: GraphFacts, calls: list[_Call]) -> GraphRunner:
    portable = load_portable(bundle, facts.file)
    with signed_weights(bundle, portable) as weights:
        model = lower_fused(portable)
        FlatMatMulPass()(model)
        return _open(bundle, to_fp32(model), facts, calls, weights)


def _open(
    bundle: Bundle, model: ir.Model, facts: GraphFacts, calls: list[_Call], given: dict[str, Array] | None = None
) -> GraphRunner:
    return open_graph(bundle, model, facts, _capacity(calls), given)


def open_graph(
    bundle: Bundle, model: ir.Model, facts: GraphFacts, capacity_rows: int, given: dict[str, Array] | None = None
) -> GraphRunner:
    """A graph of fp32 interface with caches of so many rows; `given` are weights in another form than the bundle's."""
    data: bytes = ir.to_proto(model).SerializeToString()
    weights = {**(_weights(bundle, model) or {}), **(given or {})}
    return GraphRunner(data, bundle.path.resolve(), facts, capacity_rows, weights)

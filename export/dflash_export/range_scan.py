"""Runs a half-precision graph in fp32 and notes how large each of its half-precision values becomes.

The graph is run piece by piece, its weights read as they are needed and once for all calls, so that no model is too
large to be scanned whole, from the first layer to the last.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from dflash_export.dequantize_nodes import fold_dequantize_nodes
from dflash_export.dequantized_weights import dequantized_places, read_float_rows
from dflash_export.evidence import gate_prompts
from dflash_export.graph_files import load_graph
from dflash_export.graph_runner import Array
from dflash_export.parity import PrecisionPasses
from dflash_export.piecewise_runner import PiecewiseRunner
from dflash_export.quality import text_windows
from dflash_export.range_words import MOVES, Place, describe_values
from dflash_export.weight_values import BundleWeights
from dflash_runtime.bundle import GraphFacts, Manifest
from dflash_runtime.errors import ParityError
from dflash_runtime.value_ranges import ValueRange

TEXT_TOKENS = 128
"""Of the fixed text, beside the gate's prompts."""
LOGIT_ROWS = 16
_HALVES = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
_PREFIX, _TAPS, _ROWS = "reached.", "taps", "token_rows"
_SEED = 511


def calibration_texts(root: Path, manifest: Manifest) -> list[list[int]]:
    """The gate's prompts and the beginning of a fixed text; random ids where there is no tokenizer."""
    vocab_size, limit = manifest.target.vocab_size, manifest.max_context_tokens
    file = root / "tokenizer" / "tokenizer.json"
    rng = random.Random(_SEED)
    windows = text_windows(file, vocab_size, limit) or [[rng.randrange(vocab_size) for _ in range(TEXT_TOKENS)]]
    return [ids[:limit] for ids in (*gate_prompts(file, vocab_size), windows[0][:TEXT_TOKENS])]


@dataclasses.dataclass(frozen=True)
class GraphScan:
    """What a scan found."""

    ranges: list[ValueRange]
    outputs: list[dict[str, Array]]
    """Per call the values that were asked for."""


def scan_graph(
    root: Path,
    manifest: Manifest,
    kind: str,
    facts: GraphFacts,
    passes: PrecisionPasses,
    calls: Sequence[Mapping[str, Array]],
    wanted: Sequence[str] = (),
) -> GraphScan:
    """Scans one graph of a half-precision bundle.

    Args:
        root: The bundle.
        manifest: Its manifest as far as it goes: the weight index and the quantised weights are used.
        kind: `target`, `drafter_context` or `drafter`.
        facts: Of the graph.
        passes: For running it in fp32.
        calls: Inputs of each call, caches included; calls do not follow one another.
        wanted: Values of the graph to hand back.

    Raises:
        ParityError: a value is not finite even in fp32.
    """
    model = fold_dequantize_nodes(load_graph(root, manifest.weights, facts.file), manifest.quantized)
    places = describe_values(model.graph)
    measured = _measured(model.graph, places)
    _measure(model.graph, measured, wanted)
    calls = _with_rows_alone(model.graph, root, manifest, calls)
    model = passes.to_fp32(model)
    weights = BundleWeights(root, manifest.weights, None, dequantized_places(root, manifest))
    taken = {value.name for value in model.graph.inputs}
    given = [{name: array for name, array in call.items() if name in taken} for call in calls]
    results = PiecewiseRunner(ir.to_proto(model), weights, []).run(given)
    ranges = []
    for value in measured:
        reached = max(float(result[f"{_PREFIX}{value.name}"]) for result in results)
        what, layer = places[value]
        if not np.isfinite(reached):
            raise ParityError(
                f"{kind}: {what} is not finite even in fp32, so the checkpoint itself is damaged. Fetch it again."
            )
        ranges.append(ValueRange(kind, str(value.name), what, layer, reached))
    return GraphScan(ranges, [{name: result[name] for name in wanted} for result in results])


def _measured(graph: ir.Graph, places: Mapping[ir.Value, Place]) -> list[ir.Value]:
    """The values whose size says something: no weights, no copies, and nothing that a mask makes as large as can be."""
    dynamic: set[ir.Value] = set()  # depends on weights and on the call
    moving: set[ir.Value] = {value for value in graph.inputs if not value.is_initializer()}
    found = []
    for node in graph:
        read = [value for value in node.inputs if value is not None]
        moves = any(value in moving for value in read)
        weighs = any(value in dynamic for value in read) or (moves and any(_is_stored(value) for value in read))
        moving.update(node.outputs if moves else ())
        dynamic.update(node.outputs if weighs else ())
        masked = node.op_type == "Add" and any(value in moving and value not in dynamic for value in read)
        for value in node.outputs if node.op_type != "TensorScatter" else ():
            is_residual = (value.name or "").startswith("hidden_states.")
            is_own = is_residual or (weighs and not masked and not _is_copy(node))
            if value.name == _TAPS or (value.dtype in _HALVES and value in places and is_own):
                found.append(value)
    return found


def _is_copy(node: ir.Node) -> bool:
    source = node.inputs[0] if node.inputs else None
    return node.op_type in MOVES and source is not None and source.dtype in _HALVES and not _is_stored(source)


def _is_stored(value: ir.Value) -> bool:
    """A weight, or made of weights alone."""
    node = value.producer()
    if node is None:
        return isinstance(value.const_value, ir.ExternalTensor)
    return bool(node.inputs) and all(source is None or _is_stored(source) for source in node.inputs)


def _with_rows_alone(
    graph: ir.Graph, root: Path, manifest: Manifest, calls: Sequence[Mapping[str, Array]]
) -> Sequence[Mapping[str, Array]]:
    """Puts the rows that the calls read in the place of a whole embedding table, which may be gigabytes in fp32."""
    tables = [node for node in graph if node.op_type == "Gather" and _reads_tokens(node, manifest)]
    if not tables:
        return calls
    ids = np.unique(np.concatenate([call["input_ids"].reshape(-1) for call in calls]))
    rows = ir.Value(name=_ROWS, shape=ir.Shape([1, "S"]), type=ir.TensorType(ir.DataType.INT64))
    graph.inputs.append(rows)
    for node in tables:
        table = node.inputs[0]
        assert table is not None and table.name is not None and table.dtype is not None
        read = read_float_rows(root, manifest, table.name, ids.tolist()).float().numpy()
        tensor = ir.Tensor(read.astype(table.dtype.numpy()), name=f"{table.name}.{_ROWS}")
        cut = ir.Value(name=tensor.name, shape=tensor.shape, type=table.type, const_value=tensor)
        graph.initializers[f"{table.name}.{_ROWS}"] = cut
        node.replace_input_with(0, cut)
        node.replace_input_with(1, rows)
    return [{**call, _ROWS: np.searchsorted(ids, call["input_ids"])} for call in calls]


def _reads_tokens(node: ir.Node, manifest: Manifest) -> bool:
    table, index = node.inputs[0], node.inputs[1]
    assert table is not None and index is not None
    return table.name in manifest.weights and len(table.shape or ()) == 2 and index.name == "input_ids"


def _measure(graph: ir.Graph, values: Sequence[ir.Value], wanted: Sequence[str]) -> None:
    """Makes the largest magnitude of each value an output, in place of the graph's own but for those wanted."""
    made = {value.name: value for node in graph for value in node.outputs}
    kept = [made[name] for name in wanted]
    graph.outputs.clear()
    graph.outputs.extend(kept)
    for value in values:
        size = ir.node("Abs", [value])
        largest = ir.node("ReduceMax", [size.outputs[0]], {"keepdims": 0})
        for node in (size, largest):
            node.outputs[0].type = value.type
        producer = value.producer()
        assert producer is not None
        graph.insert_after(producer, (size, largest))  # at once, or every value would have to wait for the end
        largest.outputs[0].name, largest.outputs[0].shape = f"{_PREFIX}{value.name}", ir.Shape([])
        graph.outputs.append(largest.outputs[0])


def target_calls(manifest: Manifest, texts: Sequence[Sequence[int]]) -> list[dict[str, Array]]:
    """One call for each text, over empty caches."""
    capacity = max(len(ids) for ids in texts)
    caches = empty_caches(manifest.target.graph, capacity)
    return [
        {
            "input_ids": np.array([ids], np.int64),
            "position": np.zeros(1, np.int64),
            "logit_rows": np.unique(np.linspace(0, len(ids) - 1, LOGIT_ROWS).astype(np.int64)),
            **caches,
        }
        for ids in texts
    ]


def empty_caches(facts: GraphFacts, capacity: int) -> dict[str, Array]:
    """Zeroed caches of a graph, by input name."""
    shapes = {tensor.input: tensor.cache_shape(capacity) for tensor in facts.state}
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}

"""Lowers portable graphs for ONNX Runtime's CUDA provider: `engines/ort-cuda/*.onnx` and their record.

The weights are inputs, so that any number of sessions share one copy in device memory. There is a session for each
profile of the record, which fixes S, R, b and T: everything computed from shapes is constant then, and every node left
has a CUDA kernel.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.metadata import version

import onnx_ir as ir

from dflash_engines.acceptance_graph import ACCEPTANCE, acceptance_model
from dflash_engines.call_profiles import call_profiles
from dflash_engines.candidates_graph import CANDIDATES, candidates_model
from dflash_engines.draft_windows import DRAFT_WINDOW, drafter_rings
from dflash_engines.engine_writing import write_engine
from dflash_engines.fp16_graphs import load_for_precision
from dflash_engines.passes.constant_reshape import ConstantReshapePass
from dflash_engines.passes.cuda_attention import CudaAttentionPass
from dflash_engines.passes.explicit_mask import ExplicitMaskPass
from dflash_engines.passes.graph_reading import HALF_TYPES
from dflash_engines.passes.position_tables import PositionTablesPass
from dflash_engines.passes.retype_half import RetypeHalfPass
from dflash_engines.passes.rms_norm import FuseRmsNormPass
from dflash_engines.passes.rotary_embedding import FuseRotaryEmbeddingPass
from dflash_engines.passes.row_gather import RowGatherPass
from dflash_engines.passes.scatter_rows import ScatterRowsPass
from dflash_engines.passes.transposed_matmul import FuseTransposedMatMulPass
from dflash_engines.passes.weight_inputs import WeightInputsPass, read_weight_inputs
from dflash_engines.passes.window_rows import WindowRowsPass
from dflash_engines.portable_graph import load_portable
from dflash_runtime.bundle import Bundle, GraphKind, file_facts
from dflash_runtime.device_engine import (
    STOP_ID_SLOTS,
    BoundWeight,
    DeviceEngineRecord,
    GraphEngine,
    check_device_engine,
)
from dflash_runtime.engine_record import engine_folder
from dflash_runtime.errors import EngineError
from dflash_runtime.window_rings import Ring

BACKEND = "ort-cuda"
Progress = Callable[[str, int, int], None]

CUDA_OPERATORS = frozenset({
    "Add", "And", "ArgMax", "Attention", "Cast", "Concat", "Constant", "Cos", "Div", "Equal", "Exp", "Expand", "Gather",
    "GatherND", "Gelu", "Greater", "GreaterOrEqual", "Identity", "IsNaN", "Less", "LessOrEqual", "MatMul", "Max", "Min",
    "Mul", "Neg", "Not", "Or", "Pow", "RMSNormalization", "Range", "Reciprocal", "ReduceMax", "ReduceMean",
    "ReduceSum", "Reshape", "RotaryEmbedding", "ScatterND", "Shape", "Sigmoid", "Sin", "Slice", "Softmax", "Split",
    "Sqrt", "Squeeze", "Sub", "Tanh", "TopK", "Transpose", "Unsqueeze", "Where",
})  # fmt: skip
"""Operators with kernels in the CUDA provider for the types the graphs use (ONNX Runtime's docs/OperatorKernels.md)."""
CUDA_CONTRIB_OPERATORS = frozenset({"FusedMatMul", "GroupQueryAttention"})
"""The same in the domain com.microsoft: both in fp16 and bf16, and neither GroupQueryAttention in fp32."""

_HALF = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
# Opset 24 is wanted by TensorScatter and the valid length of Attention alone, and neither is left.
_OPSET = 23
_MAKERS = ("dflash-export", "onnx", "onnx-ir")
# One more with each change to what the passes make, as the package's version may stay the same.
_LOWERING_REVISION = 1
_CHUNK_TOKENS = 128
"""Most prompt tokens of a call; a session may take fewer."""


def lower_bundle(
    bundle: Bundle | str | os.PathLike[str], precision: str | None = None, progress: Progress | None = None,
    draft_window_tokens: int | None = None,
) -> DeviceEngineRecord:
    """Writes `engines/ort-cuda` for a bundle, unless one made from the same graphs by the same versions is there.

    Args:
        bundle: The bundle, or its folder.
        precision: fp16 or bf16; None for the bundle's own.
        progress: Called with stage, graphs done, graphs in all.
        draft_window_tokens: Drafter layers without a window get this one: other proposals, the same text.

    Returns:
        The record of the engine.

    Raises:
        BundleError: the bundle is missing, incomplete or altered.
        EngineError: an fp32 bundle without `precision`, a graph the provider has no kernels for, or a window that is
            not one between block and context.
        OutputError: the folder cannot be written.
    """
    bundle = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
    if bundle.manifest.quantized:
        raise EngineError(
            f"{BACKEND} has no form for quantised weights. Run this bundle with --backend ort-cpu or a TensorRT, or "
            "build one without --quantize."
        )
    wanted = precision or bundle.manifest.precision
    versions = {name: version(name) for name in _MAKERS} | {"lowering": str(_LOWERING_REVISION)}
    if draft_window_tokens is not None:
        versions[DRAFT_WINDOW] = str(draft_window_tokens)
    present = _fitting_record(bundle)
    if present is not None and (present.versions, present.execution_precision) == (versions, wanted):
        return present
    lowered: dict[str, ir.Model] = {}
    files = bundle.manifest.graph_files()
    drafter = load_portable(bundle, files["drafter"]) if "drafter" in files else None
    call_rows = max(*bundle.manifest.block_sizes, _CHUNK_TOKENS)
    rings = drafter_rings(bundle.manifest, drafter, draft_window_tokens, call_rows)
    for kind, file in files.items():
        if progress is not None:
            progress("lower", len(lowered), len(files))
        own = {} if kind == "target" else rings
        lowered[kind] = lower_model(load_for_precision(bundle, kind, file, wanted), kind, wanted, own)
    return write_graphs(bundle, lowered, versions, wanted, rings)


def write_graphs(bundle: Bundle, lowered: Mapping[str, ir.Model], versions: dict[str, str], precision: str,
                 rings: dict[str, Ring]) -> DeviceEngineRecord:
    """Writes lowered graphs, by kind, acceptance, candidates and their record; errors as of `write_engine`."""
    manifest = bundle.manifest
    lowered = {**lowered, ACCEPTANCE: acceptance_model(STOP_ID_SLOTS),
               CANDIDATES: candidates_model(manifest.target.vocab_size)}  # fmt: skip
    block_sizes = sorted({*manifest.block_sizes} - {1}) if manifest.drafter is not None else []
    capacity = manifest.max_context_tokens + max(*manifest.block_sizes, _CHUNK_TOKENS)
    names = {kind: f"{kind}.onnx" for kind in lowered}
    engines = [
        GraphEngine(
            kind, names[kind], "", call_profiles(kind, block_sizes, _CHUNK_TOKENS, [capacity]),
            [BoundWeight(w.input, w.weight, w.dtype) for w in read_weight_inputs(model, manifest.weights)], [], 0,
        )
        for kind, model in lowered.items()
    ]  # fmt: skip
    source = {file: manifest.files[file].sha256 for file in manifest.graph_files().values()}
    return write_engine(
        bundle, BACKEND, {names[kind]: model for kind, model in lowered.items()},
        lambda folder: DeviceEngineRecord(
            DeviceEngineRecord.SCHEMA_VERSION, BACKEND, source, file_facts(folder, names.values()), precision, versions,
            rings, None, None, "fused", "shared", capacity, block_sizes, _CHUNK_TOKENS, engines,
        ),
    )  # fmt: skip


def _fitting_record(bundle: Bundle) -> DeviceEngineRecord | None:
    """What lies there; None where it is missing, damaged or of other graphs, each a reason to make it anew."""
    try:
        record = DeviceEngineRecord.read(engine_folder(bundle, BACKEND), "")
        check_device_engine(record, bundle, None, "", "")
    except EngineError:
        return None
    return record


def lower_model(model: ir.Model, kind: GraphKind, precision: str, rings: Mapping[str, Ring] | None = None) -> ir.Model:
    """Lowers one portable graph.

    Args:
        model: The portable graph in fp16 or bf16; left as it is.
        kind: Which of the three graphs it is.
        precision: fp16 or bf16, what the graph's half-precision values become. What it computes in fp32 stays fp32.
        rings: Cache input -> the ring it becomes; the others stay as long as the context.

    Returns:
        A new model: the portable one's inputs and outputs, then the weights as inputs in the type they are read in
        (`NAME`, `NAME#F32`, `NAME#rows`: see `passes/weight_inputs.py`).

    Raises:
        EngineError: a precision the provider has no attention kernel for, or an operator it lacks.
    """
    half = _HALF.get(precision)
    if half is None:
        raise EngineError(f"{BACKEND} computes in fp16 or bf16, not {precision}: its attention has no fp32 kernel. "
                          "Build the bundle with --precision bf16 or fp16, or use --backend ort-cpu.")
    lowered = model.clone()
    if not any(v.dtype in HALF_TYPES for v in (*lowered.graph.inputs, *lowered.graph.initializers.values())):
        raise EngineError(f"The {kind} graph is fp32; {BACKEND} needs a bundle of --precision bf16 or fp16.")
    WindowRowsPass(rings or {})(lowered)
    interface = [[value.name for value in values] for values in (lowered.graph.inputs, lowered.graph.outputs)]
    for lower in (
        RetypeHalfPass(half),
        FuseRmsNormPass(),
        FuseRotaryEmbeddingPass(),
        CudaAttentionPass(),
        ExplicitMaskPass(),
        ScatterRowsPass(),
        RowGatherPass(),
        PositionTablesPass(),
        WeightInputsPass(),
        FuseTransposedMatMulPass(),
        ConstantReshapePass(),
    ):
        lower(lowered)
    lowered.graph.opset_imports[""] = _OPSET
    _check(lowered, kind, interface)
    return lowered


def _check(model: ir.Model, kind: GraphKind, interface: list[list[str | None]]) -> None:
    """The interface is kept, weights follow it, and every operator has a CUDA kernel."""
    inputs, outputs = ([v.name for v in values] for values in (model.graph.inputs, model.graph.outputs))
    problems = []
    if inputs[: len(interface[0])] != interface[0] or outputs != interface[1]:
        problems.append(f"its inputs and outputs {inputs}, {outputs} do not begin with {interface}")
    foreign = sorted({f"{node.domain}::{node.op_type}" for node in model.graph if not _has_kernel(node)})
    if foreign:
        problems.append(f"ONNX Runtime's CUDA provider is not known to have {foreign}, and they would run on the CPU")
    if problems:
        raise EngineError(f"The {kind} graph cannot be lowered for {BACKEND}: {'; '.join(problems)}. "
                          "Use --backend ort-cpu for this model.")


def _has_kernel(node: ir.Node) -> bool:
    if node.domain == "com.microsoft":
        return node.op_type in CUDA_CONTRIB_OPERATORS
    return node.domain == "" and node.op_type in CUDA_OPERATORS

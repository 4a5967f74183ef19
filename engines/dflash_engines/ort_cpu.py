"""Lowers portable graphs for ONNX Runtime on a CPU: `engines/ort-cpu/*.onnx` and their record."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version

import onnx_ir as ir

from dflash_engines.draft_windows import DRAFT_WINDOW, drafter_rings
from dflash_engines.engine_writing import host_record, write_engine
from dflash_engines.passes.constant_reshape import ConstantReshapePass
from dflash_engines.passes.float8_weights import Float8WeightsPass
from dflash_engines.passes.group_query_attention import GroupQueryAttentionPass
from dflash_engines.passes.kernel_rotation import KernelRotationPass
from dflash_engines.passes.length_sliced_attention import LengthSlicedAttentionPass
from dflash_engines.passes.packed_projections import PackProjectionsPass
from dflash_engines.passes.paired_rows import PairedRowsPass
from dflash_engines.passes.quantized_matmul import ActivationPrecision, QuantizedMatMulPass
from dflash_engines.passes.quantized_rows import QuantizedRowsPass
from dflash_engines.passes.retype_to_fp32 import RetypeToFp32Pass
from dflash_engines.passes.rms_norm import FuseRmsNormPass
from dflash_engines.passes.rotary_embedding import FuseRotaryEmbeddingPass
from dflash_engines.passes.row_gather import RowGatherPass
from dflash_engines.passes.skip_norm import FuseSkipNormPass
from dflash_engines.passes.transposed_matmul import FuseTransposedMatMulPass
from dflash_engines.passes.uncut_rows import UncutRowsPass
from dflash_engines.passes.window_rings import WindowRingsPass
from dflash_engines.portable_graph import load_portable
from dflash_runtime.bundle import Bundle, GraphKind
from dflash_runtime.engine_record import HostEngineRecord, open_engine
from dflash_runtime.errors import EngineError
from dflash_runtime.window_rings import Ring

BACKEND = "ort-cpu"
Progress = Callable[[str, int, int], None]

_EXECUTION_PRECISION = "fp32"
DEFAULT_ACTIVATIONS: ActivationPrecision = "int8"
"""For products with quantised weights. ONNX Runtime's fp32 kernels are slower: with int8 weights 40 to 250 times."""
_CONTRIB_OPERATORS = frozenset(
    {"FusedMatMul", "GatherBlockQuantized", "GroupQueryAttention", "MatMulNBits", "SkipSimplifiedLayerNormalization"}
)
# A record made by other versions of these is made anew: they decide what the graphs look like. The processor does not:
# a pass knows the graph alone, and kernels and the layout of weights are ONNX Runtime's choice when it opens one.
_MAKERS = ("dflash-export", "onnx", "onnx-ir")
# One more with each change to what the passes make, as the package's version may stay the same.
_LOWERING_REVISION = 4


def lower_bundle(
    bundle: str | os.PathLike[str] | Bundle,
    progress: Progress | None = None,
    activations: ActivationPrecision = DEFAULT_ACTIVATIONS,
    draft_window_tokens: int | None = None,
) -> HostEngineRecord:
    """Writes `engines/ort-cpu` for a bundle, unless one made from the same graphs by the same versions is there.

    Args:
        bundle: The bundle, or its folder; of an opened one no file is checked again.
        progress: Called with stage, graphs done, graphs in all.
        activations: What the inputs of products with quantised weights are rounded to.
        draft_window_tokens: Drafter layers without a window get this one: other proposals, the same text.

    Returns:
        The record of the engine.

    Raises:
        BundleError: the bundle is missing, incomplete or altered.
        EngineError: a graph is not of the contract's form, or the window is not one between block and context.
        OutputError: the folder cannot be written.
    """
    bundle = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
    versions = {name: version(name) for name in _MAKERS} | {"lowering": str(_LOWERING_REVISION)}
    if bundle.manifest.quantized:
        versions["activations"] = activations
    if draft_window_tokens is not None:
        versions[DRAFT_WINDOW] = str(draft_window_tokens)
    present = _fitting_record(bundle, versions)
    if present is not None:
        return present
    files = bundle.manifest.graph_files()
    portable = {kind: load_portable(bundle, file) for kind, file in files.items()}
    rings = drafter_rings(bundle.manifest, portable.get("drafter"), draft_window_tokens)
    lowered: dict[str, ir.Model] = {}
    for kind, file in files.items():
        if progress is not None:
            progress("lower", len(lowered), len(files))
        own = {} if kind == "target" else rings
        paired = kind == "target" and "drafter" in files and activations == "int8"
        lowered[file] = lower_model(portable[kind], kind, activations=activations, rings=own, paired_rows=paired)
    record = partial(host_record, bundle, BACKEND, list(lowered), versions, _EXECUTION_PRECISION, rings)
    return write_engine(bundle, BACKEND, lowered, record)


def lower_model(
    model: ir.Model,
    kind: GraphKind,
    precision: str = _EXECUTION_PRECISION,
    activations: ActivationPrecision = DEFAULT_ACTIVATIONS,
    rings: Mapping[str, Ring] | None = None,
    *,
    paired_rows: bool = False,
) -> ir.Model:
    """Lowers one portable graph.

    Args:
        model: The portable graph in any precision; left as it is.
        kind: Which of the three graphs it is.
        precision: Precision of execution. ONNX Runtime has no half-precision MatMul on a CPU, so only fp32 is made.
        activations: What the inputs of products with quantised weights are rounded to.
        rings: Cache input -> the ring it becomes; the others stay as long as the context.
        paired_rows: Let a row alone have the bits it has in a block, where all products do: attention over it takes
            longer, so it is for targets with a drafter.

    Returns:
        A new model with the same inputs and outputs, half-precision ones as fp32. Weights stay where they are; half
        weights in files are only typed fp32 and must be bound by name, widened, when a session opens.

    Raises:
        EngineError: a precision this backend does not compute in, or a graph that is not of the contract's form.
    """
    if precision != _EXECUTION_PRECISION:
        raise EngineError(f"{BACKEND} computes in fp32, not {precision}. Ask for fp32; weights are widened on load.")
    lowered = model.clone()
    interface = _interface(lowered)
    for lower in (
        RetypeToFp32Pass(),
        FuseRmsNormPass(),
        FuseRotaryEmbeddingPass(),
        WindowRingsPass(rings or {}),
        GroupQueryAttentionPass(),
        KernelRotationPass(),
        LengthSlicedAttentionPass(),
        QuantizedRowsPass(),
        QuantizedMatMulPass(activations),
        Float8WeightsPass(),
        FuseTransposedMatMulPass(),
        PackProjectionsPass(),
        UncutRowsPass(),
        RowGatherPass(),
        FuseSkipNormPass(),
        ConstantReshapePass(),
        *([PairedRowsPass()] if paired_rows else []),
    ):
        before = len(lowered.graph)
        lower(lowered)
        _check(lowered, kind, interface, type(lower).__name__, before)
    return lowered


def _fitting_record(bundle: Bundle, versions: dict[str, str]) -> HostEngineRecord | None:
    try:
        record = open_engine(bundle, BACKEND)
    except EngineError:
        return None  # missing, damaged or of other graphs: each is a reason to make it anew
    return record if record.versions == versions else None


def _interface(model: ir.Model) -> list[list[str | None]]:
    return [[value.name for value in values] for values in (model.graph.inputs, model.graph.outputs)]


def _check(model: ir.Model, kind: GraphKind, interface: list[list[str | None]], name: str, before: int) -> None:
    """A pass keeps the interface, adds only operators this backend has, and does not grow or empty the graph."""
    count = len(model.graph)
    problems = []
    if _interface(model) != interface:
        problems.append(f"changed the interface from {interface} to {_interface(model)}")
    if count == 0 or count > 2 * before:
        problems.append(f"turned {before} nodes into {count}")
    foreign = sorted({
        f"{node.domain}::{node.op_type}"
        for node in model.graph
        if node.domain and not (node.domain == "com.microsoft" and node.op_type in _CONTRIB_OPERATORS)
    })
    if foreign:
        problems.append(f"left operators ONNX Runtime is not asked to run here: {foreign}")
    if problems:
        raise EngineError(f"{name} failed on the {kind} graph: it {'; it '.join(problems)}. Please report this graph.")

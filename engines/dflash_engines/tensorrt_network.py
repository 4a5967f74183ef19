"""A portable graph as the network an engine is built from: lowered, static but for its profiles, weights outside."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping

import onnx_ir as ir

from dflash_engines.acceptance_graph import ACCEPTANCE, acceptance_model
from dflash_engines.candidates_graph import CANDIDATES, candidates_model
from dflash_engines.fused_form import lower_fused
from dflash_engines.operator_check import check_graph
from dflash_engines.passes.flat_matmul import FlatMatMulPass
from dflash_engines.passes.fp32_residuals import Fp32ResidualsPass
from dflash_engines.passes.position_tables import PositionTablesPass
from dflash_engines.passes.retype_half import RetypeHalfPass
from dflash_engines.passes.signed_weights import SignedPart, SignedWeightsPass
from dflash_engines.passes.weight_inputs import WeightInput, WeightInputsPass
from dflash_engines.passes.window_rows import WindowRowsPass
from dflash_engines.primitive_form import lower_primitive
from dflash_engines.tensorrt_versions import VersionRow
from dflash_runtime.bundle import GraphKind
from dflash_runtime.device_engine import STOP_ID_SLOTS
from dflash_runtime.errors import EngineError
from dflash_runtime.window_rings import Ring

HALF_TYPES = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
CAPACITY = "T"


@dataclasses.dataclass(frozen=True)
class Network:
    """What the builder is given for one graph."""

    kind: str
    onnx: bytes
    """The model without weights; with `embedded` weights it refers to the bundle's files."""
    weight_inputs: list[WeightInput]
    """Empty where the weights are embedded."""
    embedded: list[SignedPart]
    """Quantised weights that the engine holds in any case, in a file `SIGNED_FILE` beside the model."""
    inputs: dict[str, list[int | str]]
    """Inputs whose shape a profile has to fix: letters are S, R, b and, in the primitive form, T."""
    activation_bytes_per_row: int
    """Size of all intermediate values of one row of S or b, an upper bound for what scratch memory may hold."""

    @property
    def sha256(self) -> str:
        """Equal for two networks that need the same engine."""
        return hashlib.sha256(self.onnx).hexdigest()


def make_network(model: ir.Model, kind: GraphKind, row: VersionRow, *, precision: str, capacity_rows: int,
                 share_weights: bool, fp32_residuals: bool = False, rings: Mapping[str, Ring] | None = None) -> Network:
    """Prepares one portable graph for a TensorRT.

    Args:
        model: The portable graph; left as it is.
        kind: Which of the three graphs it is.
        row: What the TensorRT takes.
        precision: fp16 or bf16, what the engine computes in.
        capacity_rows: Rows of every cache; the fused form needs them fixed.
        share_weights: Weights become inputs; else they stay where they are and the engine holds a copy.
        fp32_residuals: What layers add up is summed in fp32.
        rings: Cache input -> the ring it becomes; the others stay as long as the context.

    Raises:
        EngineError: a precision TensorRT has no fused kernels for, or a graph this TensorRT does not take.
    """
    if precision not in HALF_TYPES:
        raise EngineError(f"TensorRT engines compute in {' or '.join(HALF_TYPES)}, not {precision}.")
    signing = SignedWeightsPass(HALF_TYPES[precision])
    signed = model.clone()
    signing(signed)
    WindowRowsPass(rings or {})(signed)
    lowered = lower_fused(signed) if row.form == "fused" else lower_primitive(signed, kind)
    RetypeHalfPass(HALF_TYPES[precision])(lowered)
    if fp32_residuals:
        Fp32ResidualsPass()(lowered)
    PositionTablesPass()(lowered)
    FlatMatMulPass()(lowered)
    lifting = WeightInputsPass()
    if share_weights:
        lifting(lowered)
    if row.form == "fused":
        _fix_capacity(lowered, capacity_rows)
    check_graph(lowered, row)
    weights = {entry.input for entry in lifting.weight_inputs}
    shapes = {str(value.name): _shape(value) for value in lowered.graph.inputs if value.name not in weights}
    open_inputs = {name: shape for name, shape in shapes.items() if any(isinstance(dim, str) for dim in shape)}
    activation_bytes = _activation_bytes_per_row(lowered.graph)
    _forget_names(lowered)
    onnx = ir.to_proto(lowered).SerializeToString(deterministic=True)
    return Network(kind, onnx, lifting.weight_inputs, signing.parts, open_inputs, activation_bytes)


def acceptance_network() -> Network:
    """What follows verification: no weights, a few rows of integers."""
    onnx = ir.to_proto(acceptance_model(STOP_ID_SLOTS)).SerializeToString(deterministic=True)
    shapes: dict[str, list[int | str]] = {"block": [1, "b"], "posterior": [1, "b"]}
    return Network(ACCEPTANCE, onnx, [], [], shapes, activation_bytes_per_row=0)


def candidates_network(vocab_size: int) -> Network:
    """What chooses the tokens that sampling looks at: no weights, rows of logits."""
    onnx = ir.to_proto(candidates_model(vocab_size)).SerializeToString(deterministic=True)
    shapes: dict[str, list[int | str]] = {"logits": [1, "R", vocab_size]}
    return Network(CANDIDATES, onnx, [], [], shapes, activation_bytes_per_row=4 * 4 * vocab_size)


def _shape(value: ir.Value) -> list[int | str]:
    assert value.shape is not None
    return [dim if isinstance(dim, int) else str(dim) for dim in value.shape]


def _fix_capacity(model: ir.Model, capacity_rows: int) -> None:
    """TensorRT's KV update wants the rows of a cache as a number."""
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.shape = ir.Shape([capacity_rows if dim == CAPACITY else dim for dim in _shape(value)])


def _activation_bytes_per_row(graph: ir.Graph) -> int:
    total = 0.0  # four-bit types have half a byte
    for node in graph:
        for output in node.outputs:
            shape = output.shape
            if shape is None or output.dtype is None:
                continue
            sizes = [dim for dim in shape if isinstance(dim, int)]
            if len(sizes) < len(shape):  # it grows with the rows of the call
                total += math.prod(sizes) * output.dtype.itemsize
    return int(total)


def _forget_names(model: ir.Model) -> None:
    """Drops what says nothing to the builder, so that every fine-tune of a shape gives the same bytes."""
    model.metadata_props.clear()
    model.doc_string = None
    model.graph.metadata_props.clear()
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
        for output in node.outputs:
            output.metadata_props.clear()
            if not output.is_graph_output():
                output.shape = None  # symbols of the trace say nothing and may clash with the fixed sizes

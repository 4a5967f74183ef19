"""Which TensorRT takes which graph: the one table of versions, operators, devices and JetPack releases.

Imports nothing heavy, so that a machine without TensorRT or ONNX can be told what it would need.

Sources: docs/operators.md and docs/Changelog.md of onnx/onnx-tensorrt (the parser of TensorRT), NVIDIA's TensorRT and
TensorRT-RTX release notes and support matrices, NVIDIA's JetPack archive. What TensorRT-RTX takes was built with 1.7.1.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from dflash_runtime.errors import EngineError

GraphForm = Literal["fused", "primitive"]
"""`fused`: the cache is updated in place by TensorScatter and read by Attention. `primitive`: operators of opset 20
only; new key and value rows are outputs, and the runtime commits them."""

Flavour = Literal["tensorrt", "tensorrt-rtx"]

_TENSORRT_10_3 = (
    "Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh AveragePool BatchNormalization Cast CastLike Ceil "
    "Celu Clip Concat Constant ConstantOfShape Conv ConvTranspose Cos Cosh CumSum DeformConv DepthToSpace "
    "DequantizeLinear Div Dropout Einsum Elu Equal Erf Exp Expand EyeLike Flatten Floor Gather GatherElements "
    "GatherND Gelu Gemm GlobalAveragePool GlobalLpPool GlobalMaxPool Greater GreaterOrEqual GridSample "
    "GroupNormalization GRU HardSigmoid HardSwish Hardmax Identity If ImageScaler InstanceNormalization IsInf IsNaN "
    "LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax Loop LRN LSTM LpNormalization LpPool MatMul Max "
    "MaxPool Mean MeanVarianceNormalization Min Mish Mod Mul Neg NonMaxSuppression NonZero Not OneHot Or Pad "
    "ParametricSoftplus Pow PRelu QuantizeLinear RandomNormal RandomNormalLike RandomUniform RandomUniformLike Range "
    "Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum "
    "ReduceSumSquare Relu Reshape Resize ReverseSequence RNN RoiAlign Round ScaledTanh Scan Scatter ScatterElements "
    "ScatterND Selu Shape Shrink Sigmoid Sign Sin Sinh Size Slice Softmax Softplus Softsign SpaceToDepth Split Sqrt "
    "Squeeze Sub Sum Tan Tanh ThresholdedRelu Tile TopK Transpose Trilu Unsqueeze Upsample Where Xor"
)

PRIMITIVE_OPERATORS = frozenset(_TENSORRT_10_3.split())
"""Operators of TensorRT 10.3 (list of 10.1; the parser's changelog adds none in 10.2 and 10.3)."""

FUSED_OPERATORS = PRIMITIVE_OPERATORS | {"Attention", "RMSNormalization", "RotaryEmbedding", "TensorScatter"}
"""Attention came with 10.14, the other three with 10.15."""

IGNORED_ATTENTION_INPUTS = {4: "past_key", 5: "past_value", 6: "nonpad_kv_seqlen"}
"""Inputs of Attention by index that TensorRT has no use for. Its list calls them unsupported; TensorRT-RTX 1.7.1
parses such a node and leaves the input out, so that the engine attends to rows past the valid length."""


@dataclasses.dataclass(frozen=True)
class VersionRow:
    """A range of versions that take the same graph."""

    flavour: Flavour
    first: tuple[int, int]
    """First version, as (major, minor)."""
    before: tuple[int, int]
    """First version that is not in the row any more."""
    form: GraphForm
    highest_opset: int
    """Highest ONNX opset that every version of the row takes."""
    operators: frozenset[str]
    """Operators of the default domain that every version of the row takes."""


VERSIONS = (
    VersionRow("tensorrt", (10, 3), (10, 15), "primitive", 20, PRIMITIVE_OPERATORS),
    VersionRow("tensorrt", (10, 15), (12, 0), "fused", 24, FUSED_OPERATORS),
    VersionRow("tensorrt-rtx", (1, 7), (2, 0), "fused", 24, FUSED_OPERATORS),
)

_SHORT_LAYOUTS = (512, 2048, 8192)
"""Rows of the primitive form's smaller caches, each with profiles of its own."""

RTX_COMPUTE_CAPABILITIES = ((7, 5), (8, 0), (8, 6), (8, 9), (12, 0), (12, 1))
"""GPUs TensorRT-RTX 1.7 builds for: Turing, Ampere, Ada and Blackwell of workstations. No Hopper (9.0), no B200
(10.0), no Orin (8.7), no Thor (11.0)."""

TENSORRT_LOWEST_COMPUTE_CAPABILITY = (7, 5)
"""Volta (7.0) went with 10.5."""

TENSORRT_FIRST_WITH = {(10, 0): (10, 8), (12, 0): (10, 8), (10, 3): (10, 14), (12, 1): (10, 14), (11, 0): (10, 13)}
"""First TensorRT with kernels for GPUs that are younger than 10.3: compute capability -> version."""


@dataclasses.dataclass(frozen=True)
class JetPackRow:
    """What NVIDIA installs on a Jetson; none of it can be replaced from a package index."""

    name: str
    l4t: tuple[tuple[int, int], ...]
    """Releases of Jetson Linux, as (release, first part of the revision): `R36 ... REVISION: 4.3` is (36, 4)."""
    python: str
    """The system's Python, the only one that has the TensorRT module."""
    cuda: str
    tensorrt: str
    compute_capabilities: tuple[tuple[int, int], ...]


JETPACKS = (
    JetPackRow("6.1/6.2", ((36, 4), (36, 5)), "3.10", "12.6", "10.3", ((8, 7),)),
    JetPackRow("7.0/7.1", ((38, 2), (38, 4)), "3.12", "13.0", "10.13", ((11, 0),)),
    JetPackRow("7.2", ((39, 2),), "3.12", "13.2", "10.16", ((8, 7), (11, 0))),
)


def major_minor(version: str) -> tuple[int, int]:
    """The first two numbers of a version: `10.3.0.30-1+cuda12.5` -> (10, 3).

    Raises:
        EngineError: the text does not start with two numbers.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise EngineError(f"{version!r} is not a version. A TensorRT version starts with two numbers, as 10.3.")
    return int(found[1]), int(found[2])


def row_for(flavour: str, version: str) -> VersionRow:
    """The table's row for a TensorRT.

    Args:
        flavour: `tensorrt` or `tensorrt-rtx`.
        version: As the package states it, `10.3.0`, `10.16.2.10`, `1.7.1.116`.

    Raises:
        EngineError: the flavour is unknown, or the version is older or newer than the table knows.
    """
    rows = [row for row in VERSIONS if row.flavour == flavour]
    if not rows:
        known = ", ".join(dict.fromkeys(row.flavour for row in VERSIONS))
        raise EngineError(f"There is no TensorRT flavour {flavour!r}. Known: {known}.")
    number = major_minor(version)
    for row in rows:
        if row.first <= number < row.before:
            return row
    first, before = min(row.first for row in rows), max(row.before for row in rows)
    name = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT-RTX"}[flavour]
    if number < first:
        raise EngineError(
            f"{name} {version} is too old: graphs are written for {_text(first)} and newer. "
            + ("Update it; on a Jetson that means JetPack 6.1 or newer." if flavour == "tensorrt" else "Update it.")
        )
    raise EngineError(
        f"{name} {version} is newer than this dflash-export knows: it writes graphs for {_text(first)} up to "
        f"{before[0] - 1}.x. Update dflash-export, or install {name} {before[0] - 1}.x."
    )


def form_for(flavour: str, version: str) -> GraphForm:
    """Which form of the graphs this TensorRT takes; arguments and errors are those of `row_for`."""
    return row_for(flavour, version).form


def cache_layouts(form: GraphForm, capacity_rows: int) -> list[int]:
    """Rows of cache a call may read: all in the fused form; in the primitive form short contexts read less."""
    short = [rows for rows in _SHORT_LAYOUTS if form == "primitive" and 2 * rows <= capacity_rows]
    return [*short, capacity_rows]


def lacks_kernels(flavour: str, version: str, compute_capability: tuple[int, int]) -> str | None:
    """Why this TensorRT cannot build for a GPU, as one sentence; None where it can.

    Args:
        flavour: `tensorrt` or `tensorrt-rtx`.
        version: As the package states it.
        compute_capability: Of the GPU, (9, 0) for an H200.
    """
    gpu = _text(compute_capability)
    if flavour == "tensorrt-rtx":
        if compute_capability in RTX_COMPUTE_CAPABILITIES:
            return None
        known = ", ".join(_text(item) for item in RTX_COMPUTE_CAPABILITIES)
        return f"TensorRT-RTX {version} has no kernels for compute capability {gpu}; it has them for {known}."
    if compute_capability < TENSORRT_LOWEST_COMPUTE_CAPABILITY:
        lowest = _text(TENSORRT_LOWEST_COMPUTE_CAPABILITY)
        return f"TensorRT {version} has no kernels for compute capability {gpu}; it has them from {lowest}."
    first = TENSORRT_FIRST_WITH.get(compute_capability)
    if first is not None and major_minor(version) < first:
        return f"TensorRT {version} has no kernels for compute capability {gpu}; {_text(first)} is the first with them."
    return None


def jetpack_for_l4t(l4t: str) -> JetPackRow | None:
    """The row of a Jetson Linux release such as `36.4.3`; None where the table has none."""
    number = major_minor(l4t)
    return next((row for row in JETPACKS if number in row.l4t), None)


def _text(number: tuple[int, int]) -> str:
    return f"{number[0]}.{number[1]}"

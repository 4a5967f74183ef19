"""Portable graphs as fp16 engines may have them: what a bf16 bundle's own scan found beyond fp16 is put in fp32.

The graphs of an fp16 bundle say themselves what is fp32.
"""

from __future__ import annotations

import onnx_ir as ir

from dflash_engines.half_precision import keep_in_fp32
from dflash_engines.portable_graph import load_portable
from dflash_runtime.bundle import Bundle
from dflash_runtime.errors import EngineError
from dflash_runtime.value_ranges import FP16_LARGEST, RangeRecord, ValueRange, read_ranges

_TAPS = "taps"


def load_for_precision(bundle: Bundle, kind: str, file: str, precision: str) -> ir.Model:
    """A portable graph for an engine.

    Args:
        bundle: The bundle.
        kind: `target`, `drafter_context` or `drafter`.
        file: The graph's file.
        precision: What the engine computes in.

    Raises:
        BundleError: `ranges.json` is damaged.
        EngineError: fp16 cannot hold a value of the graph, and it cannot be kept in fp32 either.
    """
    model, record = load_portable(bundle, file), read_ranges(bundle)
    if not _converts(bundle, precision) or record is None:
        return model
    if kind == "drafter_context":
        return _keep(model, record, kind, _wide_taps(bundle, record))
    return _keep(model, record, kind)


def _converts(bundle: Bundle, precision: str) -> bool:
    return precision == "fp16" and bundle.manifest.precision == "bf16"


def _wide_taps(bundle: Bundle, record: RangeRecord) -> frozenset[str]:
    """The drafter takes its taps as the target hands them on."""
    target = _keep(load_portable(bundle, bundle.manifest.target.graph.file), record, "target")
    taps = next(value for value in target.graph.outputs if value.name == _TAPS)
    return frozenset({_TAPS}) if taps.dtype == ir.DataType.FLOAT else frozenset()


def _keep(model: ir.Model, record: RangeRecord, kind: str, more: frozenset[str] = frozenset()) -> ir.Model:
    beyond = record.beyond(kind)
    try:
        return keep_in_fp32(model, more.union(one.value for one in beyond))
    except EngineError as error:
        stuck = next(one for one in beyond if not _can_be_kept(model, one))
        raise EngineError(
            f"The {kind} is not safe in fp16: {stuck.what} reached {stuck.reached:.3g}, and fp16 ends at "
            f"{FP16_LARGEST:,.0f}. {error} Leave --precision at bf16."
        ) from error


def _can_be_kept(model: ir.Model, one: ValueRange) -> bool:
    try:
        keep_in_fp32(model, [one.value])
    except EngineError:
        return False
    return True


def fp16_warnings(bundle: Bundle, precision: str) -> list[str]:
    """What the user should know of an engine in this precision before trusting it."""
    if precision != "fp16":
        return []
    record = read_ranges(bundle)
    if record is None:
        return [
            "The bundle does not say how large its values become (an older dflash-export made it), and fp16 ends at "
            f"{FP16_LARGEST:,.0f}. Build it again, or compute in bf16."
        ]
    beyond = record.beyond()
    if not beyond:
        return []
    worst = max(beyond, key=lambda one: one.reached)
    return [
        f"{len(beyond)} values are kept in fp32: the largest, {worst.what}, reached {worst.reached:.3g}, and fp16 ends "
        f"at {FP16_LARGEST:,.0f}."
    ]

"""What becomes of a half-precision graph's rounding: none, emulated, or left out where fp16 cannot hold a value."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from dflash_engines.passes.emulate_half import EmulateHalfPass
from dflash_engines.passes.fp32_islands import Fp32IslandsPass
from dflash_engines.passes.retype_to_fp32 import RetypeToFp32Pass


def to_fp32(model: ir.Model) -> ir.Model:
    """A copy computed in fp32 throughout: the graph's structure without its rounding.

    Args:
        model: A graph in any precision; left as it is.

    Returns:
        The copy. Half-precision weights in files are typed fp32 and must be bound by name, widened.
    """
    copy = model.clone()
    RetypeToFp32Pass()(copy)
    return copy


def emulate_half(model: ir.Model) -> ir.Model:
    """A copy that computes each node in fp32 and rounds its result as the graph's own dtypes say.

    Args:
        model: A graph in any precision; left as it is.

    Returns:
        The copy, with fp32 inputs and outputs; weights are read from their files as they are stored.
    """
    copy = model.clone()
    EmulateHalfPass()(copy)
    return copy


def keep_in_fp32(model: ir.Model, names: Collection[str]) -> ir.Model:
    """A copy in which the named half-precision values are fp32, with what carries them on.

    Args:
        model: A portable graph in half precision; left as it is.
        names: Values of the graph.

    Raises:
        EngineError: a value enters a cache or attention, which hold half precision.
    """
    copy = model.clone()
    Fp32IslandsPass(names)(copy)
    return copy

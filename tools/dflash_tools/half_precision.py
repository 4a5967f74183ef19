"""The graph edits that let a half-precision bundle be checked on a CPU, as the parity gate takes them."""

from __future__ import annotations

import onnx_ir as ir

from dflash_engines.passes.retype_to_fp32 import RetypeToFp32Pass


def to_fp32(model: ir.Model) -> ir.Model:
    """Everything in fp32; weights in files are bound by name, widened."""
    RetypeToFp32Pass()(model)
    return model


def emulate_half(model: ir.Model) -> ir.Model:
    """Every result rounded to the graph's own dtype, on kernels that compute in fp32."""
    from dflash_engines.passes.emulate_half import EmulateHalfPass

    EmulateHalfPass()(model)
    return model

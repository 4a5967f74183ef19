"""Named values in fp32: they and what carries them on, nothing else, and never what a cache or attention holds."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from bare_ort import BareSession
from test_fp32_residuals import outputs, with_large_sums
from test_lowered_attention import CAPACITY, inputs_of
from tiny_graphs import Layer, Sizes, target_model

from dflash_engines.half_precision import emulate_half, keep_in_fp32, to_fp32
from dflash_runtime.errors import EngineError

SIZES = Sizes(precision="fp16", layers=(Layer(),) * 3, head_norms=True)
HALF = ir.DataType.FLOAT16


def sums(model: ir.Model) -> list[ir.Value]:
    return [n.outputs[0] for n in model.graph if n.op_type == "Add" and n.outputs[0].dtype == HALF
            and list(n.outputs[0].shape or ()) == [1, "S", SIZES.hidden]]  # fmt: skip


def wide_sums(model: ir.Model) -> int:
    return sum(node.op_type == "Add" and list(node.outputs[0].shape or ()) == [1, "S", SIZES.hidden]
               and node.outputs[0].dtype == ir.DataType.FLOAT for node in model.graph)  # fmt: skip


def named(model: ir.Model) -> ir.Model:
    for number, value in enumerate(sums(model)):
        value.name = value.name or f"sum.{number}"
    return model


def test_no_name_no_change() -> None:
    model = target_model(SIZES)
    kept = keep_in_fp32(model, ["nothing.of.this.name"])
    assert ir.to_proto(kept).SerializeToString() == ir.to_proto(model).SerializeToString()


def test_the_stream_is_fp32_from_the_named_sum_on() -> None:
    model = named(target_model(SIZES))
    total = len(sums(model))
    for first in range(total):
        kept = keep_in_fp32(model, [str(sums(model)[first].name)])
        assert wide_sums(kept) == total - first == total - len(sums(kept))
        exact = outputs(to_fp32(model), position=0, rows=9)
        found = outputs(to_fp32(kept), position=0, rows=9)
        assert all((found[name] == exact[name]).all() for name in exact)


def test_what_overflows_is_finite_and_right_when_it_is_named() -> None:
    model = named(with_large_sums(target_model(SIZES), 4e4))
    kept = keep_in_fp32(model, [str(value.name) for value in sums(model)])
    exact, plain, found = (
        BareSession(edited, CAPACITY)(**inputs_of(model, 0, 9))["logits"]
        for edited in (to_fp32(model), emulate_half(model), emulate_half(kept))
    )
    assert not np.isfinite(plain).all()
    assert np.abs(found - exact).max() / np.abs(exact).max() < 1e-2


@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_attention_or_a_cache_holds_is_refused(place: int) -> None:
    model = target_model(SIZES)
    node = next(node for node in model.graph if node.op_type == "Attention")
    value = node.inputs[place]
    assert value is not None
    value.name = value.name or "held"
    with pytest.raises(EngineError, match=r"held by attention or a KV cache"):
        keep_in_fp32(model, [value.name])

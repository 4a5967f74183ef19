"""Rotations that the attention kernel does itself, and those it is not asked to do."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from test_lowered_attention import FULL, TARGETS, WINDOW, compare, operators
from tiny_graphs import Sizes, target_model

from dflash_engines.ort_cpu import lower_model
from dflash_engines.passes.group_query_attention import GroupQueryAttentionPass
from dflash_engines.passes.kernel_rotation import KernelRotationPass
from dflash_engines.passes.rotary_embedding import FuseRotaryEmbeddingPass


def rotating(model: ir.Model) -> list[ir.Node]:
    kernels = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    return [node for node in kernels if node.attributes.get_int("do_rotary", 0)]


def before_the_pass(sizes: Sizes) -> ir.Model:
    model = target_model(sizes)
    FuseRotaryEmbeddingPass()(model)
    GroupQueryAttentionPass()(model)
    assert operators(model)["RotaryEmbedding"] == 2 * len(sizes.layers)
    return model


def rotations(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == "RotaryEmbedding"]


@pytest.mark.parametrize("name", ["causal", "windows", "qk-norm-bias", "softcap", "two-scaled-tables"])
def test_the_kernel_rotates(name: str) -> None:
    lowered = lower_model(target_model(TARGETS[name]), "target")
    assert len(rotating(lowered)) == len(TARGETS[name].layers)
    assert operators(lowered)["RotaryEmbedding"] == 0


def test_tables_are_made_once_for_all_layers() -> None:
    one = lower_model(target_model(Sizes(layers=(FULL, WINDOW, FULL, FULL))), "target")
    two = lower_model(target_model(Sizes(layers=(FULL, WINDOW, FULL, FULL), rope_thetas=(1e4, 50.0))), "target")
    assert [operators(model)["Pad"] for model in (one, two)] == [2, 4]
    assert [operators(model)["Cos"] for model in (one, two)] == [1, 2]


def test_a_table_width_the_kernel_refuses_stays_outside() -> None:
    sizes = TARGETS["table-of-another-width"]
    lowered = lower_model(target_model(sizes), "target")
    assert not rotating(lowered)
    assert operators(lowered)["RotaryEmbedding"] == 2 * len(sizes.layers)


def test_different_tables_for_queries_and_keys_stay_outside() -> None:
    model = before_the_pass(Sizes(rope_thetas=(1e4, 50.0)))
    query, other = rotations(model)[0], rotations(model)[2]
    for index in (1, 2):
        query.replace_input_with(index, other.inputs[index])
    KernelRotationPass()(model)
    assert query in rotations(model) and len(rotating(model)) == 1


def test_a_rotated_key_with_another_reader_stays() -> None:
    model = before_the_pass(Sizes())
    key = rotations(model)[1]
    model.graph.outputs.append(key.outputs[0])
    KernelRotationPass()(model)
    assert key in rotations(model) and len(rotating(model)) == 1


@pytest.mark.parametrize(("attribute", "value"), [("interleaved", 1), ("rotary_embedding_dim", 8)])
def test_other_kinds_of_rotation_stay_outside(attribute: str, value: int) -> None:
    model = before_the_pass(Sizes())
    for node in rotations(model):
        node.attributes[attribute] = ir.AttrInt64(attribute, value)
    assert not KernelRotationPass()(model).modified
    assert not rotating(model)


def test_the_check_sees_a_table_in_the_wrong_place() -> None:
    """The comparison of outputs can fail: the zeros come behind the rows of this call."""
    model = target_model()
    lowered = lower_model(model, "target")
    for concat in [node for node in lowered.graph if node.op_type == "Concat"]:
        readers = {reader.op_type for reader in concat.outputs[0].consumers()}
        if readers == {"Pad"}:
            earlier, zero = concat.inputs
            concat.replace_input_with(0, zero)
            concat.replace_input_with(1, earlier)
    with pytest.raises(AssertionError):
        compare(model, lowered)

"""Planted faults: the comparison of the primitive form with the portable graph must see each of them."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
import pytest
from primitive_cases import DRAFTERS, TARGETS, compare_drafter, compare_target
from tiny_graphs import drafter_model, target_model

from dflash_engines.primitive_form import lower_primitive


def off_by_one_window(model: ir.Model) -> None:
    """Makes the window of every mask one row wider."""
    for index, node in enumerate([node for node in model.graph if node.op_type == "Sub"]):
        size = node.inputs[1]
        assert size is not None and size.const_value is not None
        wider = ir.Value(name=f"wider.{index}", const_value=ir.Tensor(size.const_value.numpy() + 1, name="wider"))
        model.graph.register_initializer(wider)
        node.replace_input_with(1, wider)


def dead_row_visible(model: ir.Model) -> None:
    """Lets queries see the first cache row past the valid length."""
    for node in list(model.graph):
        if node.op_type == "Less" and model.graph.inputs[1] in node.inputs:
            wrong = ir.node("LessOrEqual", node.inputs)
            model.graph.insert_before(node, wrong)
            ir.convenience.replace_all_uses_with(node.outputs[0], wrong.outputs[0])


def bidirectional(model: ir.Model) -> None:
    for node in model.graph:
        node.attributes.pop("is_causal", None)


def causal(model: ir.Model) -> None:
    for node in model.graph:
        if node.op_type == "Attention":
            node.attributes["is_causal"] = ir.AttrInt64("is_causal", 1)


def rows_of_keys_and_values_swapped(model: ir.Model) -> None:
    (joined,) = {value.producer() for value in model.graph.outputs if (value.name or "").startswith("new_rows.")}
    assert joined is not None
    first, second, *rest = joined.inputs
    for index, value in enumerate([second, first, *rest]):
        joined.replace_input_with(index, value)


Fault = Callable[[ir.Model], None]
BEFORE, AFTER = "before", "after"


@pytest.mark.parametrize(
    ("name", "fault", "when"),
    [
        ("mistral", off_by_one_window, BEFORE),
        ("llama", bidirectional, BEFORE),
        ("llama", dead_row_visible, AFTER),
        ("llama", rows_of_keys_and_values_swapped, AFTER),
    ],
)
def test_a_fault_in_a_target_is_seen(name: str, fault: Fault, when: str) -> None:
    model = target_model(TARGETS[name])
    faulty = model.clone()
    if when == BEFORE:
        fault(faulty)
    lowered = lower_primitive(faulty, "target")
    if when == AFTER:
        fault(lowered)
    with pytest.raises(AssertionError):
        compare_target(model, lowered, fill=1.0)


@pytest.mark.parametrize("fault", [causal, dead_row_visible])
def test_a_fault_in_a_drafter_is_seen(fault: Fault) -> None:
    sizes = DRAFTERS["bidirectional"]
    model = drafter_model(sizes)
    faulty = model.clone()
    if fault is causal:
        fault(faulty)
    lowered = lower_primitive(faulty, "drafter")
    if fault is not causal:
        fault(lowered)
    with pytest.raises(AssertionError):
        compare_drafter(model, lowered, sizes, fill=1.0)

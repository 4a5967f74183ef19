"""Ways to plant a fault into a finished bundle or its engine, or an edit that must change nothing."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from faults import edit_graph, plant
from pairs import FULL, SLIDING, Pair

from dflash_runtime.bundle import Bundle, file_facts

PAIR = Pair(
    "validated",
    target={
        "tie_word_embeddings": False, "attention_bias": True, "use_sliding_window": True, "sliding_window": 16,
        "max_window_layers": 2,
    },
    drafter={
        "taps": (0, 2), "layer_types": [SLIDING, FULL], "sliding_window": 8, "attention_bias": True, "block_size": 8,
    },
    likely_tokens=3,
    max_context_tokens=128,
)  # fmt: skip
"""Head apart from the embedding, biases everywhere, windows on both sides, proposals accepted now and then."""

Change = Callable[[Path], None]


def write_weight(bundle: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Changes one fp32 weight in its file."""
    entry = Bundle.open(bundle, check_files=False).manifest.weights[name]
    with (bundle / entry.file).open("r+b") as stream:
        stream.seek(entry.offset_bytes)
        values = np.frombuffer(stream.read(entry.length_bytes), np.float32).reshape(entry.shape).copy()
        stream.seek(entry.offset_bytes)
        stream.write(np.ascontiguousarray(change(values), np.float32).tobytes())


def weight(name: str, change: Callable[[Any], Any] | None = None) -> Change:
    """One number of a weight is off by a half, or what `change` makes of the weight."""

    def off(values: Any) -> Any:
        values.flat[values.size // 2] += 0.5
        return values

    return lambda bundle: write_weight(bundle, name, change or off)


def graph(file: str, change: Callable[[ir.Model], None]) -> Change:
    """A portable graph is another one, and the engine is made from it."""
    return lambda bundle: plant(bundle, lambda root: edit_graph(root, file, change))


def planted(fault: Change) -> Change:
    """A fault of a bundle's graphs or facts, with hashes and engines that fit."""
    return lambda bundle: plant(bundle, fault)


def engine(file: str, change: Callable[[ir.Model], None]) -> Change:
    """Only what the runtime executes is another graph; its record fits."""

    def fault(bundle: Path) -> None:
        folder = bundle / "engines" / "ort-cpu"
        edit_graph(bundle, f"engines/ort-cpu/{file}", change)
        record = json.loads((folder / "engine.json").read_text(encoding="utf-8"))
        facts = file_facts(folder, record["files"])
        record["files"] = {name: dataclasses.asdict(one) for name, one in facts.items()}
        (folder / "engine.json").write_text(json.dumps(record), encoding="utf-8")

    return fault


def manifest(change: Callable[[dict[str, Any]], None]) -> Change:
    """The bundle says something else about the pair."""

    def fault(bundle: Path) -> None:
        path = bundle / "bundle.json"
        data = json.loads(path.read_text(encoding="utf-8"))
        change(data)
        path.write_text(json.dumps(data), encoding="utf-8")

    return fault


def text_file(name: str, change: Callable[[str], str]) -> Change:
    def fault(bundle: Path) -> None:
        path = bundle / "tokenizer" / name
        path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")

    return fault


def value(model: ir.Model, name: str) -> ir.Value:
    return next(v for node in model.graph for v in node.outputs if v.name == name)


def insert(model: ir.Model, name: str, make: Callable[[ir.Value], list[ir.Node]]) -> None:
    """Puts nodes behind a value; what they make takes its name and its place."""
    old = value(model, name)
    uses, producer = list(old.uses()), old.producer()
    assert producer is not None
    nodes = make(old)
    new = nodes[-1].outputs[0]
    new.type, new.shape, old.name, new.name = old.type, old.shape, f"{name}.before", name
    model.graph.insert_after(producer, nodes)
    for use in uses:
        use.node.replace_input_with(use.idx, new)
    for i, output in enumerate(model.graph.outputs):
        if output is old:
            model.graph.outputs[i] = new


def constant(model: ir.Model, name: str, values: Any) -> ir.Value:
    tensor = ir.tensor(np.asarray(values), name=f"planted.{name}")
    kind, shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape)
    made = ir.Value(name=tensor.name, const_value=tensor, type=kind, shape=shape)
    model.graph.register_initializer(made)
    return made


def rename_weight(name: str, other: str) -> Callable[[ir.Model], None]:
    """One weight is read where another one belongs."""

    def change(model: ir.Model) -> None:
        wrong, right = model.graph.initializers[name], model.graph.initializers[other]
        for use in tuple(wrong.uses()):
            use.node.replace_input_with(use.idx, right)
        del model.graph.initializers[name]

    return change


def scaled_constant(name: str, factor: float) -> Callable[[ir.Model], None]:
    def change(model: ir.Model) -> None:
        initializer = model.graph.initializers[name]
        assert initializer.const_value is not None
        values = initializer.const_value.numpy() * np.float32(factor)
        initializer.const_value = ir.tensor(values.astype(np.float32), name=name)

    return change


def token_ids_are_off_by_one(model: ir.Model) -> None:
    insert(model, "token_ids", lambda old: [ir.node("Add", [old, constant(model, "one", np.int64([1]))])])


def draft_ids_are_off_by_one(model: ir.Model) -> None:
    insert(model, "draft_ids", lambda old: [ir.node("Add", [old, constant(model, "one", np.int64([1]))])])


def target_sits_one_position_late(model: ir.Model) -> None:
    position = next(v for v in model.graph.inputs if v.name == "position")
    node = next(use.node for use in position.uses() if use.node.op_type == "Unsqueeze")
    late = ir.node("Add", [position, constant(model, "one", np.int64([1]))])
    model.graph.insert_before(node, late)
    node.replace_input_with(0, late.outputs[0])


def target_window_is_wider(model: ir.Model) -> None:
    for node in model.graph:
        if node.op_type == "Attention" and node.metadata_props["dflash.window"]:
            node.metadata_props["dflash.window"] = "17"
        number = scalar(node)
        if number is not None and abs(number) == 16:
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.array(17 * np.sign(number), number.dtype)))


def scalar(node: ir.Node) -> Any:
    """The number of a constant, None for everything else."""
    if node.op_type != "Constant" or "value" not in node.attributes:
        return None
    tensor = node.attributes["value"].as_tensor()
    return tensor.numpy().reshape(()) if tensor.size == 1 else None


def attention_scale_is_off(layer: int) -> Callable[[ir.Model], None]:
    def change(model: ir.Model) -> None:
        for node in model.graph:
            if node.op_type == "Attention" and node.metadata_props["dflash.layer"] == str(layer):
                scale = node.attributes["scale"].as_float() if "scale" in node.attributes else 32**-0.5
                node.attributes["scale"] = ir.AttrFloat32("scale", scale * 1.05)

    return change


def epsilon_is_large(model: ir.Model) -> None:
    for node in model.graph:
        if scalar(node) == np.float32(1e-6):
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.float32(0.05)))


def residual_is_scaled(model: ir.Model) -> None:
    insert(model, "hidden_states.2", lambda old: [ir.node("Mul", [old, constant(model, "f", np.float32(1.01))])])


def overflows_in_half(model: ir.Model) -> None:
    """A value passes through a range that fp16 does not have."""
    big, small = constant(model, "big", np.float16(60000)), constant(model, "small", np.float16(1 / 60000))

    def through(old: ir.Value) -> list[ir.Node]:
        up = ir.node("Mul", [old, big])
        up.outputs[0].type = old.type
        return [up, ir.node("Mul", [up.outputs[0], small])]

    insert(model, "hidden_states.2", through)


# What changes nothing but the order of computation: (name, nodes that make the same value again).
def _same(old: ir.Value) -> list[ir.Node]:
    return [ir.node("Identity", [old])]


def _twice_negated(old: ir.Value) -> list[ir.Node]:
    first = ir.node("Neg", [old])
    return [first, ir.node("Neg", [first.outputs[0]])]


def _doubled_and_halved(old: ir.Value) -> list[ir.Node]:
    first = ir.node("Add", [old, old])
    half = ir.node("Constant", [], attributes={"value": ir.AttrTensor("value", ir.tensor(np.float32(0.5)))})
    return [first, half, ir.node("Mul", [first.outputs[0], half.outputs[0]])]


def _at_least_itself(old: ir.Value) -> list[ir.Node]:
    return [ir.node("Max", [old, old])]


NEUTRAL_NODES = [_same, _twice_negated, _doubled_and_halved, _at_least_itself]
NEUTRAL_PLACES = [
    ("target.onnx", "hidden_states.0"), ("target.onnx", "hidden_states.1"), ("target.onnx", "hidden_states.3"),
    ("target.onnx", "logits"), ("drafter_context.onnx", "linear"), ("drafter.onnx", "embedding"),
]  # fmt: skip

"""Faults planted into the drafter of a healthy bundle: the kind that costs acceptance and shows nowhere else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir

from dflash_engines.ort_cpu import lower_bundle
from dflash_export.build import describe
from dflash_export.taps import select_taps
from dflash_runtime.bundle import MANIFEST_NAME, Bundle

DRAFTER, CONTEXT, TARGET = "drafter.onnx", "drafter_context.onnx", "target.onnx"


def plant(bundle: Path, fault: Callable[[Path], None]) -> None:
    """Changes a bundle as a faulty exporter would have made it: hashes and engines fit the faulty graphs."""
    fault(bundle)
    describe(bundle, Bundle.open(bundle, check_files=False).manifest, {})
    shutil.rmtree(bundle / "engines")
    lower_bundle(bundle)


def nothing(bundle: Path) -> None:
    """The control: planting itself changes nothing."""


def last_slot_is_another_token(bundle: Path) -> None:
    """The last mask id of a block is another id."""

    def change(model: ir.Model) -> None:
        ids = _input(model, "input_ids")
        gather = next(node for node in ids.uses() if node.node.op_type == "Gather").node
        minus_one, far = _constant(model, "last", [-1]), _constant(model, "far", [2**62])
        axis, zero = _constant(model, "axis", [1]), _constant(model, "zero", [0])
        first = ir.node("Slice", [ids, zero, minus_one, axis])
        last = ir.node("Slice", [ids, minus_one, far, axis])
        other = ir.node("Add", [last.outputs[0], minus_one])
        joined = ir.node("Concat", [first.outputs[0], other.outputs[0]], attributes={"axis": 1})
        model.graph.insert_before(gather, [first, last, other, joined])
        gather.replace_input_with(1, joined.outputs[0])

    edit_graph(bundle, DRAFTER, change)


def block_sits_one_position_late(bundle: Path) -> None:
    """Rotary positions of the block are one too high; where rows are written stays."""
    edit_graph(bundle, DRAFTER, _late)


def context_sits_one_position_late(bundle: Path) -> None:
    """Rotary positions of the context are one too high."""
    edit_graph(bundle, CONTEXT, _late)


def full_layer_is_causal(bundle: Path) -> None:
    """Full layers hide later tokens of the block."""

    def change(model: ir.Model) -> None:
        for node in _attention(model):
            if node.metadata_props["dflash.causal"] == "0":
                node.attributes["is_causal"] = ir.AttrInt64("is_causal", 1)
                node.metadata_props["dflash.causal"] = "1"

    edit_graph(bundle, DRAFTER, change)


def window_is_one_wider(bundle: Path) -> None:
    """Sliding layers see one token more."""
    edit_graph(bundle, DRAFTER, lambda model: _resize_window(model, 1))


def window_is_one_narrower(bundle: Path) -> None:
    """Sliding layers see one token less."""
    edit_graph(bundle, DRAFTER, lambda model: _resize_window(model, -1))


def taps_are_swapped(bundle: Path) -> None:
    """The taps are concatenated in another order."""
    _retap(bundle, lambda ids: ids[::-1])


def taps_are_one_layer_late(bundle: Path) -> None:
    """Every tap is the output of the layer after the right one."""
    _retap(bundle, lambda ids: [i + 1 for i in ids])


def mask_id_is_wrong(bundle: Path) -> None:
    """The runtime fills blocks with another id."""
    path = bundle / MANIFEST_NAME
    data = json.loads(path.read_text(encoding="utf-8"))
    data["drafter"]["mask_token_id"] -= 1
    path.write_text(json.dumps(data), encoding="utf-8")


def fused_taps_lack_their_norm_weight(bundle: Path) -> None:
    """hidden_norm.weight counts as 1."""
    manifest = Bundle.open(bundle, check_files=False).manifest
    entry = manifest.weights["drafter.hidden_norm.weight"]
    with (bundle / entry.file).open("r+b") as stream:
        stream.seek(entry.offset_bytes)
        stream.write(np.ones(entry.shape, np.float32).tobytes())


FAULTS = [
    nothing,
    last_slot_is_another_token,
    block_sits_one_position_late,
    context_sits_one_position_late,
    full_layer_is_causal,
    window_is_one_wider,
    window_is_one_narrower,
    taps_are_swapped,
    taps_are_one_layer_late,
    mask_id_is_wrong,
    fused_taps_lack_their_norm_weight,
]


def edit_graph(bundle: Path, file: str, change: Callable[[ir.Model], None]) -> None:
    """Changes one portable graph in place; its weights stay in their files."""
    model = ir.load(bundle / file)
    change(model)
    ir.save(model, bundle / file)


def _late(model: ir.Model) -> None:
    position = _input(model, "position")
    node = next(use.node for use in position.uses() if use.node.op_type == "Unsqueeze")
    late = ir.node("Add", [position, _constant(model, "one", [1])])
    model.graph.insert_before(node, late)
    node.replace_input_with(0, late.outputs[0])


def _resize_window(model: ir.Model, by: int) -> None:
    for node in _attention(model):
        window = node.metadata_props["dflash.window"]
        if window:
            node.metadata_props["dflash.window"] = str(int(window) + by)
            limits = [n for n in model.graph if n.op_type == "Constant" and _scalar(n) == int(window)]
            assert len(limits) == 1
            limits[0].attributes["value"] = ir.AttrTensor("value", ir.tensor(np.array(int(window) + by)))


def _scalar(constant: ir.Node) -> int | None:
    value = constant.attributes.get("value")
    return None if value is None or value.as_tensor().size != 1 else value.as_tensor().numpy().item()


def _retap(bundle: Path, change: Callable[[list[int]], list[int]]) -> None:
    manifest = Bundle.open(bundle, check_files=False).manifest
    ids = change(manifest.taps.layer_ids)
    edit_graph(bundle, TARGET, lambda model: select_taps(model, ids, manifest.target.hidden_size))


def _attention(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == "Attention"]


def _input(model: ir.Model, name: str) -> ir.Value:
    return next(value for value in model.graph.inputs if value.name == name)


def _constant(model: ir.Model, name: str, values: list[int]) -> ir.Value:
    tensor = ir.tensor(np.array(values, np.int64), name=f"planted.{name}")
    value = ir.Value(name=tensor.name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=ir.Shape([1]))
    model.graph.register_initializer(value)
    return value

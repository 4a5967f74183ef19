"""A small quantised pair, and faults in how its bundle holds quantised weights, each with what must be named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pairs import Pair, quiet
from planting import PAIR, Change, engine, rename_weight
from safetensors.torch import load_file, save_file
from tiny_models import edit_json, write_target
from transformers import PreTrainedConfig

from dflash_engines.ort_cpu import lower_bundle
from dflash_export.build import export_bundle
from dflash_export.build_plan import plan_build
from dflash_export.quantization import QuantizeOptions, quantize_options
from dflash_runtime.bundle import Bundle

OPTIONS = quantize_options("int4", "int4", "int8", symmetric=False)
"""Zero points of their own in the target, one scale a channel in the drafter; a head of its own."""


def export_quantized(folder: Path, pair: Pair = PAIR, options: QuantizeOptions = OPTIONS) -> Path:
    """Writes a pair and its bundle with quantised weights, exported and lowered without the gate."""
    pair.write(folder)
    (folder / "bundle").mkdir()
    plan = plan_build(dataclasses.replace(pair.options(folder), quantize=options))
    export_bundle(plan, folder / "bundle", quiet)
    lower_bundle(folder / "bundle")
    return folder / "bundle"


def write_gptq_target(folder: Path) -> PreTrainedConfig:
    """A tiny Llama whose layers are stored as GPTQ does, groups of 32 with zero points of their own."""
    config = write_target(folder, "llama")
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        stored = _as_gptq(tensors.pop(name).numpy())
        tensors |= {f"{name.removesuffix('.weight')}.{key}": torch.from_numpy(array) for key, array in stored.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_json(folder / "config.json", quantization_config={
        "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "checkpoint_format": "gptq_v2",
    })  # fmt: skip
    return config


def _as_gptq(weight: Any) -> dict[str, Any]:
    groups = weight.reshape(weight.shape[0], -1, 32)
    scales = ((groups.max(-1) - groups.min(-1)) / 15).astype(np.float16)
    zeros = np.clip(np.round(-groups.min(-1) / scales), 0, 15).astype(np.uint32)
    values = np.clip(np.round(groups / scales[..., None]) + zeros[..., None], 0, 15).astype(np.uint32)
    return {
        "qweight": _words(values.reshape(weight.shape).T), "scales": np.ascontiguousarray(scales.T),
        "qzeros": np.ascontiguousarray(_words(zeros).T),
    }  # fmt: skip


def _words(values: Any) -> Any:
    """int32 words of eight values each along the first axis, the first in the lowest bits."""
    shifts = 4 * np.arange(8, dtype=np.uint32)[:, None]
    pieces = values.reshape(-1, 8, values.shape[1]) << shifts
    return np.ascontiguousarray(np.bitwise_or.reduce(pieces, axis=1)).view(np.int32)


def part(name: str, role: str, change: Callable[[Any], Any]) -> Change:
    """Changes values (bytes), scales [out, ...] in fp32 or zero points (bytes) of a quantised weight in its file."""

    def fault(bundle: Path) -> None:
        manifest = Bundle.open(bundle, check_files=False).manifest
        facts = manifest.quantized[name]
        entry = manifest.weights[str({"values": name, "scales": facts.scales, "zero_points": facts.zero_points}[role])]
        with (bundle / entry.file).open("r+b") as stream:
            stream.seek(entry.offset_bytes)
            stored = np.frombuffer(stream.read(entry.length_bytes), np.float32 if role == "scales" else np.uint8)
            array = stored.reshape(entry.shape[0], -1)
            changed = np.ascontiguousarray(change(array.copy()), array.dtype)
            assert changed.shape == array.shape and not np.array_equal(changed, array)
            stream.seek(entry.offset_bytes)
            stream.write(changed.tobytes())

    return fault


def one_scale_is_wrong(scales: Any) -> Any:
    scales[5, 0] *= 1.1
    return scales


def scales_sit_one_row_late(scales: Any) -> Any:
    return np.roll(scales, 1, axis=0)


def nibbles_are_swapped(values: Any) -> Any:
    return (values >> 4) | (values << 4)


def one_value_is_one_step_off(values: Any) -> Any:
    values[3, 7] ^= 1
    return values


def zero_points_are_shifted(points: Any) -> Any:
    """By one step, in every second group."""
    return (points & 0xF0) | ((points + 1) & 0x0F)


def values_are_signed(values: Any) -> Any:
    """As other formats store them: the top bit of each value turned."""
    return values ^ 0x80


def columns_are_reversed(values: Any) -> Any:
    return values[:, ::-1]


class QuantizedFault(NamedTuple):
    name: str
    change: Change
    graph: str
    layer: int | None
    part: str
    tensor: str


def _in(layer: int, name: str) -> str:
    return f"model.layers.{layer}.{name}.weight"


UP, DOWN, Q, V, O = "mlp.up_proj", "mlp.down_proj", "self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj"  # noqa: E741
OTHER_SCALES = rename_weight(f"{_in(1, V)}.scales", f"{_in(2, V)}.scales")
QUANTIZED_FAULTS = [
    QuantizedFault("a wrong scale", part(_in(1, UP), "scales", one_scale_is_wrong), "target", 1, "MLP",
                   "1.mlp.up_proj"),
    QuantizedFault("scales one row late", part(_in(2, Q), "scales", scales_sit_one_row_late), "target", 2, "q",
                   "2.self_attn.q_proj"),
    QuantizedFault("swapped nibbles", part(_in(0, V), "values", nibbles_are_swapped), "target", 0, "v",
                   "0.self_attn.v_proj"),
    QuantizedFault("shifted zero points", part(_in(3, O), "zero_points", zero_points_are_shifted), "target", 3,
                   "attention output", "3.self_attn.o_proj"),
    QuantizedFault("one value one step off", part(_in(1, DOWN), "values", one_value_is_one_step_off), "target", 1,
                   "MLP", "1.mlp.down_proj"),
    QuantizedFault("a wrong scale of the head", part("lm_head.weight", "scales", one_scale_is_wrong), "target", None,
                   "head", "logits"),
    QuantizedFault("an engine that reads another layer's scales", engine("target.onnx", OTHER_SCALES), "target", 1, "v",
                   "1.self_attn.v_proj"),
    QuantizedFault("a drafter's wrong scale", part("drafter.fc.weight", "scales", one_scale_is_wrong),
                   "drafter_context", None, "context", "drafter.fc"),
    QuantizedFault("a drafter's signed values", part("drafter.layers.0.self_attn.k_proj.weight", "values",
                   values_are_signed), "drafter_context", 0, "k", "0.self_attn.k_proj"),
    QuantizedFault("a drafter's scales one row late", part("drafter.layers.1.mlp.gate_proj.weight", "scales",
                   scales_sit_one_row_late), "drafter", 1, "MLP", "1.mlp.gate_proj"),
    QuantizedFault("a drafter's columns reversed", part("drafter.layers.0.self_attn.o_proj.weight", "values",
                   columns_are_reversed), "drafter", 0, "attention output", "0.self_attn.o_proj"),
]  # fmt: skip

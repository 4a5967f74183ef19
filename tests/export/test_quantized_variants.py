"""Quantised checkpoints that lack something, or ask for more than weights: refused by name, never misread."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_export.build_plan import BuildOptions, plan_build, plan_target
from dflash_export.quantized_formats.imported_place import ImportedPlace, imported_parts
from dflash_export.weight_store import store_weights
from dflash_runtime.errors import CheckpointError

CHECKPOINTS = Path(__file__).parents[1] / "cross" / "quantized_checkpoints"
Edit = Callable[[dict[str, Tensor], dict[str, Any]], None]
"""Changes tensors and quantization_config in place."""


def changed(name: str, folder: Path, edit: Edit) -> str:
    """A copy of a checkpoint that its library wrote, with one thing changed."""
    shutil.copytree(CHECKPOINTS / name, folder)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    edit(tensors, config["quantization_config"])
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def without(ending: str) -> Edit:
    def edit(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith(ending)]:
            del tensors[name]

    return edit


def saying(**facts: Any) -> Edit:
    return lambda _, config: config.update(facts)


def said_of_weights(**facts: Any) -> Edit:
    return lambda _, config: config["config_groups"]["group_0"]["weights"].update(facts)


def both(*edits: Edit) -> Edit:
    def edit(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for one in edits:
            one(tensors, config)

    return edit


def in_dtype(ending: str, dtype: torch.dtype) -> Edit:
    def edit(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith(ending)]:
            tensors[name] = tensors[name].view(dtype)

    return edit


ONLINE = {"config_groups": {"R4": {"type": "hadamard", "apply": [{"targets": ["down_proj"], "location": "input"}]}}}
REFUSED: dict[str, tuple[str, Edit, str]] = {
    "FP8 without scales": ("ct-fp8", without("weight_scale"), "holds no weight_scale for it"),
    "ModelOpt's FP8 without scales": ("modelopt-fp8", without("weight_scale"), "holds no weight_scale for it"),
    "int8 without scales": ("ct-int8", without("q_proj.weight_scale"), "q_proj is quantised .*no weight_scale"),
    "AWQ without scales": ("awq", without("scales"), r"\(AWQ\).*holds no scales"),
    "GPTQ without zero points": ("gptq", without("qzeros"), r"\(GPTQ\).*holds no qzeros"),
    "reordered, nobody knows how": ("gptq", both(without("g_idx"), saying(desc_act=True)), "holds no g_idx"),
    "reordered, nobody knows how (2)": ("ct-int4", said_of_weights(actorder="group"), "act-order .actorder 'group'"),
    "reordered, as it was called later": ("ct-int4", said_of_weights(actorder="dynamic"), "actorder 'dynamic'"),
    "another width": ("gptq", saying(bits=8), "words for 48 of 8 bits"),
    "no width": ("gptq", lambda _, config: config.pop("bits"), "GPTQ weights of None bits"),
    "other words": ("gptq", in_dtype("qweight", torch.int16), "qweight .GPTQ. holds I16"),
    "zero points of old": ("ct-int4-asymmetric", in_dtype("zero_point", torch.int8), "zero_point .* holds I8"),
    "rotated inputs": ("gptq", saying(rotation="hadamard"), "inputs would have to be rotated"),
    "rotated inputs (2)": ("ct-int4", saying(transform_config=ONLINE), "rotates input while the model runs"),
    "sparse": ("ct-int4", saying(sparsity_config={"format": "sparse-24-bitmask"}), "stored sparse"),
    "marlin": ("ct-int4", saying(format="marlin-24"), "marlin-24 is not taken"),
    "four-bit floats": ("ct-int4", saying(format="nvfp4-pack-quantized"), "nvfp4-pack-quantized is not taken"),
    "another layout of AWQ": (
        "awq", both(saying(checkpoint_format="gemv"), lambda _, config: config.pop("version")), "layout 'gemv'"
    ),
    "a cache in int8": ("modelopt-fp8", saying(kv_cache_scheme={"type": "int", "num_bits": 8}), "its KV cache too"),
    "a cache in four bits": ("modelopt-fp8", saying(kv_cache_scheme="NVFP4"), "its KV cache too"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_by_name(case: str, tmp_path: Path) -> None:
    name, edit, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message):
        plan_build(BuildOptions(changed(name, tmp_path / "t", edit)))


@pytest.mark.parametrize("edit", [
    said_of_weights(actorder="weight"), said_of_weights(actorder="static"),
    saying(transform_config={"config_groups": {"R1": {"apply": [{"location": "weight_output"}]}}}),
    saying(sparsity_config={"format": "dense"}),
])  # fmt: skip
def test_what_is_part_of_the_weights_is_taken(edit: Edit, tmp_path: Path) -> None:
    plan = plan_target(BuildOptions(changed("ct-int4", tmp_path / "t", edit)))
    assert sum(isinstance(place, ImportedPlace) for place in plan.checkpoint.places.values()) == 7


def test_what_is_left_aside_is_said() -> None:
    notes = [plan_target(BuildOptions(str(CHECKPOINTS / name))).notes for name in ("modelopt-fp8-kv", "modelopt-int4")]
    assert notes == [["the checkpoint was made for activations and KV cache in FP8 too; here its weights alone are in "
                      "FP8"], []]  # fmt: skip


def test_parts_without_a_config_are_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    shutil.copytree(CHECKPOINTS / "ct-fp8", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": "fp8"}))
    with pytest.raises(CheckpointError, match=r"quantization_config is 'fp8' and no JSON object"):
        plan_build(BuildOptions(str(folder)))
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"weight_scale, which belongs to a quantised weight.*no quantization_"):
        plan_build(BuildOptions(str(folder)))


def test_floats_of_eight_bits_that_nobody_explains(tmp_path: Path) -> None:
    """A checkpoint that was cast to FP8, which says nothing of what its values stand for."""
    folder = tmp_path / "t"
    shutil.copytree(CHECKPOINTS / "ct-fp8", folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {n: t for n, t in load_file(folder / "model.safetensors").items() if not n.endswith("weight_scale")}
    save_file(tensors, folder / "model.safetensors")
    places = plan_target(BuildOptions(str(folder))).checkpoint.places
    with pytest.raises(CheckpointError, match="stored as F8_E4M3, and nothing says which floats it means"):
        store_weights(tmp_path, "w.safetensors", places, "F32", lambda *_: None)


def test_an_embedding_in_fp8_is_refused_by_name(tmp_path: Path) -> None:
    def edit(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
        table = tensors["model.embed_tokens.weight"]
        tensors["model.embed_tokens.weight"] = table.to(torch.float8_e4m3fn)
        tensors["model.embed_tokens.weight_scale"] = torch.ones(len(table), 1, dtype=torch.bfloat16)

    places = plan_target(BuildOptions(changed("ct-fp8", tmp_path / "t", edit))).checkpoint.places
    products = [name for name in places if name.endswith("_proj.weight")]
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight is quantised .*whose rows are picked"):
        imported_parts(places, products, "BF16")

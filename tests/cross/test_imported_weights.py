"""Targets that others quantised, built in full; `tests/export/test_quantised_checkpoints.py` compares their weights.

The checkpoints were written by each format's own library, see `quantized_checkpoints/write_checkpoints.py`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from pairs import quiet
from safetensors.torch import load_file, save_file
from tiny_models import edit_json, write_target

from dflash_export.build_plan import BuildOptions
from dflash_export.quantization import quantize_options
from dflash_runtime.bundle import Bundle
from dflash_runtime.errors import CheckpointError
from dflash_tools.pipeline import build

CHECKPOINTS = Path(__file__).parent / "quantized_checkpoints"
FAST = {"ct-int4-asymmetric": "bf16", "ct-fp8": "bf16"}
SLOW = {
    "ct-int4": "fp32", "ct-int8": "bf16", "ct-int8-asymmetric": "fp32", "ct-fp8-tensor": "fp32", "awq": "fp16",
    "gptq": "fp32", "gptq-int8-asymmetric": "fp16", "modelopt-int4": "fp32", "modelopt-fp8": "bf16",
    "ct-act-order-weight": "fp32", "gptq-static-groups": "fp16", "modelopt-fp8-channel": "fp32",
    "modelopt-fp8-kv": "bf16",
}  # fmt: skip


@pytest.mark.parametrize(("name", "precision"), [
    *FAST.items(), *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW.items()),
])
def test_a_build_passes_every_check(name: str, precision: str, tmp_path: Path) -> None:
    report = build(BuildOptions(str(CHECKPOINTS / name), precision=precision), tmp_path / "bundle", "ort-cpu", quiet)
    assert any("in perplexity was not measured: the checkpoint holds what" in note for note in report.notes)
    bundle = Bundle.open(tmp_path / "bundle")
    meant = json.loads((CHECKPOINTS / name / "meant.json").read_text())["weights"]
    assert bundle.manifest.quantized.keys() == meant.keys()
    assert all(row.passed for row in bundle.manifest.checks)
    assert {"portable", "lowered", "tokens"} <= {row.stage for row in bundle.manifest.checks}
    asymmetric = any(facts.zero_points is not None for facts in bundle.manifest.quantized.values())
    assert asymmetric == (name.endswith("asymmetric") or name == "awq")


def test_layouts_and_precisions_are_refused_by_name(tmp_path: Path) -> None:
    shutil.copytree(CHECKPOINTS / "awq", tmp_path / "t")
    with pytest.raises(CheckpointError, match=r"scales in fp16, which bf16 cannot hold.*--precision fp16 or fp32"):
        build(BuildOptions(str(tmp_path / "t"), precision="bf16"), tmp_path / "b", "none", quiet)
    config = json.loads((tmp_path / "t" / "config.json").read_text())["quantization_config"]
    edit_json(tmp_path / "t" / "config.json", quantization_config={**config, "version": "gemv"})
    with pytest.raises(CheckpointError, match="layout 'gemv' are not taken"):
        build(BuildOptions(str(tmp_path / "t")), tmp_path / "b", "none", quiet)
    for name in ("gptq-act-order", "ct-act-order"):
        with pytest.raises(CheckpointError, match=r"_proj is quantised with act-order"):
            build(BuildOptions(str(CHECKPOINTS / name)), tmp_path / "b", "none", quiet)


@pytest.mark.parametrize("whose", ["asked for", pytest.param("given", marks=pytest.mark.slow)])
def test_a_table_in_fp8_is_refused_by_name(whose: str, tmp_path: Path) -> None:
    """Embedding and head are one here, and no operator of ONNX picks rows of FP8."""
    if whose == "asked for":
        write_target(tmp_path / "t", "llama", tie_word_embeddings=True)
        options = BuildOptions(str(tmp_path / "t"), quantize=quantize_options("keep", "fp8", "keep"))
        message = "embed_tokens.weight would be FP8.*Leave --quantize-head at keep"
    else:
        shutil.copytree(CHECKPOINTS / "ct-fp8", tmp_path / "t")
        tensors = load_file(tmp_path / "t" / "model.safetensors")
        table = tensors["model.embed_tokens.weight"]
        tensors["model.embed_tokens.weight"] = table.to(torch.float8_e4m3fn)
        tensors["model.embed_tokens.weight_scale"] = torch.ones(len(table), 1, dtype=torch.bfloat16)
        save_file(tensors, tmp_path / "t" / "model.safetensors")
        options, message = BuildOptions(str(tmp_path / "t")), "embed_tokens.weight is FP8.*whose embedding.*are floats"
    with pytest.raises(CheckpointError, match=message):
        build(options, tmp_path / "b", "none", quiet)
    assert not (tmp_path / "b").exists()


def test_other_formats_are_refused_by_name(tmp_path: Path) -> None:
    write_target(tmp_path / "t", "llama")
    for config, message in (
        ({"quant_method": "bitsandbytes"}, r"quantised \(bitsandbytes\); taken as they are: awq, compressed-tensors"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "ModelOpt's NVFP4 is not taken"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ weights of 3 bits"),
        ({"quant_method": "gptq", "bits": 4}, "holds no weight of that format"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"input_activations": {"num_bits": 8}}}},
         "quantises activations too"),
        ({"quant_method": "fp8"}, r"quantised \(fp8\); taken as they are"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}, "quantises its KV cache too"),
    ):  # fmt: skip
        edit_json(tmp_path / "t" / "config.json", quantization_config=config)
        with pytest.raises(CheckpointError, match=message):
            build(BuildOptions(str(tmp_path / "t")), tmp_path / "b", "none", quiet)

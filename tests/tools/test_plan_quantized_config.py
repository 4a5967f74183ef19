"""What configs of quantised checkpoints say, module by module; that it is what a build stores is for tests/cross."""

from __future__ import annotations

from typing import Any

import pytest
from test_plan_parameters import QWEN2_7B, drafter_config

from dflash_runtime.errors import CheckpointError
from dflash_tools.decoder_families import read_model_shape
from dflash_tools.drafter_shape import read_drafter_shape
from dflash_tools.model_shape import WeightForm
from dflash_tools.quantized_config import read_stored_forms
from dflash_tools.weight_bytes import Storage, model_bytes

Q, K, DOWN = (f"model.layers.3.{name}" for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"))
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}


def packed(*, ignore: tuple[str, ...] = ("lm_head",), targets: tuple[str, ...] = ("Linear",), **weights: Any
           ) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64, **weights}
    return {"quant_method": "compressed-tensors", "ignore": list(ignore),
            "config_groups": {"group_0": {"targets": list(targets), "weights": weights}}}  # fmt: skip


def modelopt(algorithm: str, **others: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **others}


def int4(group: int, symmetric: bool = True) -> WeightForm:
    return WeightForm("int4", group, symmetric)


@pytest.mark.parametrize(("config", "module", "form"), [
    (AWQ, Q, int4(128, False)),
    (AWQ, "lm_head", None),
    ({**AWQ, "zero_point": False, "group_size": 64}, Q, int4(64)),
    ({**AWQ, "modules_to_not_convert": ["self_attn"]}, Q, None),
    ({**AWQ, "modules_to_not_convert": ["self_attn"]}, DOWN, int4(128, False)),
    (GPTQ, Q, int4(128)),
    (GPTQ, "lm_head", None),
    ({**GPTQ, "lm_head": True}, "lm_head", int4(128)),
    ({**GPTQ, "bits": 8, "group_size": -1, "sym": False}, Q, WeightForm("int8", None, False)),
    ({**GPTQ, "dynamic": {r"-:model\.layers\.3\.self_attn": {}}}, Q, None),
    ({**GPTQ, "dynamic": {r"+:.*\.3\.mlp": {"bits": 8, "group_size": -1}}}, DOWN, WeightForm("int8")),
    ({**GPTQ, "modules_in_block_to_quantize": [["self_attn.q_proj"]]}, K, None),
    ({**GPTQ, "modules_in_block_to_quantize": [["self_attn.q_proj"]]}, Q, int4(128)),
    (packed(), Q, int4(64)),
    (packed(symmetric=False), Q, int4(64, False)),
    (packed(group_size=None, strategy="channel"), Q, int4(128)),  # one scale a row is repeated for groups
    (packed(num_bits=8, group_size=None, strategy="channel"), Q, WeightForm("int8")),
    (packed(num_bits=8, type="float", group_size=None, strategy="tensor"), Q, WeightForm("fp8")),
    (packed(ignore=(Q,)), Q, None),
    (packed(ignore=("re:.*layers.3.*",)), Q, None),
    (packed(ignore=()), "lm_head", int4(64)),
    (packed(targets=("re:.*mlp.*",)), Q, None),
    (packed(targets=("re:.*mlp.*",)), DOWN, int4(64)),
    (modelopt("FP8"), Q, WeightForm("fp8")),
    (modelopt("W4A16_AWQ"), Q, int4(128)),
    (modelopt("W4A16", config_groups={"g": {"weights": {"group_size": 64}}}), Q, int4(64)),
    (modelopt("FP8", ignore=["model.layers.3*"]), Q, None),
    (modelopt("FP8"), "lm_head", None),
])  # fmt: skip
def test_the_form_of_a_module(config: dict[str, Any], module: str, form: WeightForm | None) -> None:
    forms = read_stored_forms({"quantization_config": config}, "it")
    assert forms is not None and forms.form(module, 3584) == form


@pytest.mark.parametrize(("config", "words"), [
    ({"quant_method": "fp8"}, r"quantised \(fp8\); taken as they are: awq, compressed-tensors, gptq, modelopt"),
    ({**AWQ, "version": "gemv"}, "layout 'gemv'"),
    ({**GPTQ, "bits": 3}, "GPTQ weights of 3 bits"),
    (packed(num_bits=6), "weights of 6 bits"),
    (packed(type="float", num_bits=4), "float weights of 4 bits"),
    (packed(type="float", num_bits=8, strategy="block"), "by block; FP8 by tensor or channel"),
    ({**packed(), "kv_cache_scheme": {"num_bits": 8}}, "KV cache too"),
    (modelopt("NVFP4"), "ModelOpt's NVFP4 is not taken"),
    (packed(group_size=48), "int4 in groups of 48 over 3584 inputs"),
])  # fmt: skip
def test_what_no_build_takes_is_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_model_shape({**QWEN2_7B, "quantization_config": config}, "it")


def test_activations_in_int8_are_refused() -> None:
    config = packed(num_bits=8, group_size=None, strategy="channel")
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
    with pytest.raises(CheckpointError, match="activations too"):
        read_model_shape({**QWEN2_7B, "quantization_config": config}, "it")


def test_awq_of_qwen2_7b_to_the_byte() -> None:
    """Qwen/Qwen2-7B-Instruct-AWQ by its config: layers in int4 with zero points, tables and vectors in fp16."""
    shape = read_model_shape({**QWEN2_7B, "torch_dtype": "float16", "quantization_config": AWQ}, "awq")
    linear = 28 * (2 * 3584 * 3584 + 2 * 512 * 3584 + 3 * 18944 * 3584)
    tables, vectors = 2 * 152064 * 3584, 28 * (3584 + 2 * 512 + 2 * 3584) + 3584
    groups = linear // 128
    expected = linear // 2 + 2 * groups + groups // 2 + 2 * (tables + vectors)
    assert model_bytes(shape, Storage("fp16", "fp16")) == expected
    assert shape.num_parameters == read_model_shape(QWEN2_7B, "plain").num_parameters


def test_layers_that_are_left_out_are_counted_in_floats() -> None:
    kept = {**QWEN2_7B, "quantization_config": packed(ignore=("lm_head", "re:.*layers.0.*"))}
    whole = {**QWEN2_7B, "quantization_config": packed()}
    sizes = [model_bytes(read_model_shape(config, "q"), Storage("bf16", "bf16")) for config in (kept, whole)]
    layer = 2 * 3584 * 3584 + 2 * 512 * 3584 + 3 * 18944 * 3584
    assert sizes[0] - sizes[1] == 2 * layer - layer // 2 - layer // 64 * 2
    with pytest.raises(CheckpointError, match="leaves all its layers out"):
        read_model_shape({**QWEN2_7B, "quantization_config": packed(ignore=("re:.*",))}, "q")


def test_a_drafter_may_bring_its_fusing_matrix_quantised() -> None:
    target = read_model_shape(QWEN2_7B, "q")
    by_linear = read_drafter_shape(drafter_config(target, quantization_config=packed()), target, "d")
    assert by_linear.fuse.form == int4(64) and by_linear.body.quantised_as == ("int4 in groups of 64",)
    in_layers = read_drafter_shape(drafter_config(target, quantization_config=GPTQ), target, "d")
    assert in_layers.fuse.form is None and in_layers.body.quantised_as == ("int4 in groups of 128",)
    plain = read_drafter_shape(drafter_config(target), target, "d")
    assert plain.num_parameters == by_linear.num_parameters == in_layers.num_parameters

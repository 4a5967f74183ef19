"""Parameter counts from config.json alone, against the real modules on torch's meta device: not one may differ."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dflash_export.drafter import Drafter
from dflash_export.drafter_config import parse_drafter_config
from dflash_runtime.errors import CheckpointError, PairError, UnsupportedModelError
from dflash_tools import decoder_families
from dflash_tools.decoder_families import FAMILIES, read_model_shape
from dflash_tools.drafter_shape import assumed_drafter, read_drafter_shape
from dflash_tools.model_shape import ModelShape
from dflash_tools.weight_bytes import Storage, model_bytes

QWEN2_7B: dict[str, Any] = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
    "max_position_embeddings": 32768, "torch_dtype": "bfloat16",
}  # fmt: skip
# Configs as published, and toy ones for what none of those has.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2-7b": QWEN2_7B,
    "qwen2.5-0.5b": {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "qwen3-4b": {
        "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "head_dim": 128,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "qwen3-bias": {"model_type": "qwen3", "num_hidden_layers": 2, "attention_bias": True},
    "llama-3.1-8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    },
    "smollm2-135m": {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    },
    "llama-biases": {"model_type": "llama", "num_hidden_layers": 3, "attention_bias": True, "mlp_bias": True},
    "mistral-7b": {"model_type": "mistral", "vocab_size": 32768, "sliding_window": None},
    "mistral-nemo": {
        "model_type": "mistral", "hidden_size": 5120, "num_hidden_layers": 40, "head_dim": 128, "vocab_size": 131072,
    },
    "gemma-2b": {
        "model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18,
        "num_attention_heads": 8, "num_key_value_heads": 1,
    },
    "gemma2-2b": {"model_type": "gemma2"},
    "gemma3-1b": {
        "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144,
        "sliding_window": 512,
    },
    "phi3-mini": {"model_type": "phi3", "sliding_window": 2047},
    "smollm3-3b": {"model_type": "smollm3"},
    "smollm3-biases": {"model_type": "smollm3", "num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True},
}  # fmt: skip


def real_parameters(config: dict[str, Any]) -> int:
    known = {key: value for key, value in config.items() if key not in ("model_type", "torch_dtype")}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **known))
    model.tie_weights()
    return sum(parameter.numel() for parameter in {id(p): p for p in model.parameters()}.values())


def drafter_config(target: ModelShape, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size, "num_hidden_layers": 5, "head_dim": target.head_dim,
        "num_attention_heads": target.num_heads, "num_key_value_heads": target.num_kv_heads, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "rope_theta": 1e6, "max_position_embeddings": 40960, "block_size": 16,
        "dflash_config": {"target_layer_ids": [1, 7, 13, 19, 25], "mask_token_id": 151669}, **changes,
    }  # fmt: skip


def real_drafter_parameters(config: dict[str, Any], target: ModelShape) -> int:
    with torch.device("meta"):
        drafter = Drafter(parse_drafter_config(config, "here"), target.vocab_size)
    borrowed = ("embed_tokens.", "lm_head.")
    return sum(p.numel() for name, p in drafter.named_parameters() if not name.startswith(borrowed))


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_module(name: str) -> None:
    assert read_model_shape(CONFIGS[name], name).num_parameters == real_parameters(CONFIGS[name])


def test_every_family_is_compared() -> None:
    assert {config["model_type"] for config in CONFIGS.values()} == set(FAMILIES)


def test_qwen2_7b_to_the_byte() -> None:
    shape = read_model_shape(QWEN2_7B, "qwen2-7b")
    assert model_bytes(shape, Storage("bf16", "bf16")) == 15_231_233_024 == 2 * real_parameters(QWEN2_7B)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_key_left_out_is_what_transformers_takes(model_type: str) -> None:
    real = AutoConfig.for_model(model_type)
    shape = read_model_shape({"model_type": model_type}, model_type)
    assert shape.num_layers == real.num_hidden_layers
    assert shape.hidden_size == real.hidden_size
    assert shape.num_kv_heads == real.num_key_value_heads
    assert shape.intermediate_size == real.intermediate_size
    assert shape.vocab_size == real.vocab_size
    assert shape.max_position_tokens == real.max_position_embeddings
    assert (shape.head_elements == 0) is real.tie_word_embeddings


@pytest.mark.parametrize("name", ["mistral-nemo", "gemma2-2b", "gemma3-1b", "phi3-mini", "qwen3-4b"])
def test_windows_are_those_transformers_sees(name: str) -> None:
    config = CONFIGS[name]
    real = AutoConfig.for_model(**config)
    kinds = getattr(real, "layer_types", None)
    window = real.sliding_window
    expected = [window] * real.num_hidden_layers if kinds is None else [
        window if kind == "sliding_attention" else None for kind in kinds
    ]
    assert [layer.window_tokens for layer in read_model_shape(config, name).kv_layers] == expected


def test_a_dropped_bias_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: a family without its 28 x 4608 biases is no longer exact."""
    broken = {**FAMILIES, "qwen2": dataclasses.replace(FAMILIES["qwen2"], qkv_bias=False)}
    monkeypatch.setattr(decoder_families, "FAMILIES", broken)
    missing = real_parameters(QWEN2_7B) - read_model_shape(QWEN2_7B, "qwen2-7b").num_parameters
    assert missing == 28 * (3584 + 2 * 512)


def test_gemma3_with_vision_counts_its_text_decoder() -> None:
    text = {k: v for k, v in CONFIGS["gemma3-1b"].items() if k != "model_type"}
    shape = read_model_shape({"model_type": "gemma3", "text_config": text, "vision_config": {}}, "g")
    assert shape.num_parameters == real_parameters(CONFIGS["gemma3-1b"])
    assert any("vision" in note for note in shape.notes)


@pytest.mark.parametrize("bias", [False, True])
def test_drafter_parameters_are_those_of_the_module(bias: bool) -> None:
    target = read_model_shape(CONFIGS["qwen3-4b"], "qwen3-4b")
    config = drafter_config(target, attention_bias=bias)
    assert read_drafter_shape(config, target, "d").num_parameters == real_drafter_parameters(config, target)


def test_the_default_drafter_of_qwen2_7b_is_as_large_as_the_module() -> None:
    target = read_model_shape(QWEN2_7B, "qwen2-7b")
    drafter = assumed_drafter(target)
    assert drafter.assumed
    assert drafter.num_parameters == real_drafter_parameters(drafter_config(target), target)
    assert round(drafter.num_parameters / 1e9, 2) == 1.23


@pytest.mark.parametrize("model_type", ["mamba", "mixtral", "qwen3_5", ""])
def test_an_unknown_family_is_refused_by_name(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{model_type!r}.*gemma2.*qwen2, qwen3"):
        read_model_shape({"model_type": model_type}, "x")


def test_what_cannot_be_counted_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"quantised \(fp8\)"):
        read_model_shape({**QWEN2_7B, "quantization_config": {"quant_method": "fp8"}}, "x")
    with pytest.raises(CheckpointError, match="hidden_size is 'wide'"):
        read_model_shape({**QWEN2_7B, "hidden_size": "wide"}, "x")


def test_a_drafter_for_another_target_is_refused() -> None:
    target = read_model_shape(QWEN2_7B, "qwen2-7b")
    with pytest.raises(PairError, match="hidden_size 2560, qwen2-7b has 3584"):
        read_drafter_shape(drafter_config(target, hidden_size=2560), target, "d")
    with pytest.raises(PairError, match="taps target layer 28; qwen2-7b has layers 0 to 27"):
        config = drafter_config(target, dflash_config={"target_layer_ids": [1, 28], "mask_token_id": 1})
        read_drafter_shape(config, target, "d")
    with pytest.raises(UnsupportedModelError, match="domino"):
        read_drafter_shape(drafter_config(target, projector_type="domino"), target, "d")


DFLASH2 = {"architectures": ["DFlash2DraftModel"], "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256,
           "selector_top_k": 16}  # fmt: skip


def test_what_dflash2_adds_is_counted() -> None:
    target = read_model_shape(CONFIGS["qwen3-4b"], "qwen3-4b")
    config = drafter_config(target, **DFLASH2)
    assert read_drafter_shape(config, target, "d").num_parameters == real_drafter_parameters(config, target)


def test_a_speculators_drafter_with_its_own_head_is_counted() -> None:
    target = read_model_shape(CONFIGS["qwen3-4b"], "qwen3-4b")
    left_out = ("dflash_config", "block_size", "architectures")
    body = {key: value for key, value in drafter_config(target).items() if key not in left_out}
    config = {
        "speculators_model_type": "dflash", "transformer_layer_config": {**body, "vocab_size": target.vocab_size},
        "draft_vocab_size": 32000, "block_size": 8, "mask_token_id": 5,
        "aux_hidden_state_layer_ids": [2, 8, 14, 20, 26],
    }  # fmt: skip
    shape = read_drafter_shape(config, target, "d")
    assert (shape.block_size, shape.num_taps) == (8, 5)
    head = 32000 * target.hidden_size
    assert shape.num_parameters == real_drafter_parameters(config, target) + head


def test_longrope_limits_the_context() -> None:
    config = {**CONFIGS["phi3-mini"], "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
              "rope_scaling": {"type": "longrope"}}  # fmt: skip
    assert read_model_shape(config, "phi3").max_position_tokens == 4096

"""Small random checkpoints, complete as a user would have them: no downloads, the same bytes on every run.

Matrices are 0.2*N(0,1), norm weights 1 + 0.3*N(0,1), biases 0.3*N(0,1). A plain initialisation leaves norms at
exactly 1 and biases at exactly 0, and so hides a dropped norm or bias.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

VOCAB_SIZE = 512
BOS, EOS, IM_END = 256, 257, 258

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)

_BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": None,
}
TARGETS: dict[str, dict[str, Any]] = {
    "qwen3": {"num_hidden_layers": 4, "head_dim": 32, "tie_word_embeddings": True},
    "qwen2": {"num_hidden_layers": 3, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "llama": {"num_hidden_layers": 2, "head_dim": 16, "tie_word_embeddings": False},
}
"""What each kind of target adds to the common sizes; another model type starts from these common sizes."""


def fill(tensors: dict[str, Tensor], seed: int = 0) -> None:
    """Fills tensors in place by the rule of this module; the name tells norms and biases from matrices."""
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(tensors):
        tensor = tensors[name]
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
        if name.endswith("bias"):
            noise = 0.3 * noise
        elif "norm" in name or tensor.dim() == 1:
            noise = 1 + 0.3 * noise
        else:
            noise = 0.2 * noise
        tensor.copy_(noise)


def write_target(
    path: Path,
    kind: str = "qwen3",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tokenizer: bool = True,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> PreTrainedConfig:
    """Writes a complete checkpoint folder of a small causal language model.

    Args:
        path: Folder to make.
        kind: Model type as Transformers calls it; see `TARGETS` for those with sizes of their own.
        seed: Of the weights.
        dtype: Of the weights.
        tokenizer: Write the byte-level tokenizer too.
        max_shard_size: As `save_pretrained` takes it; "100KB" makes several files and an index.
        overrides: Config values, such as `tie_word_embeddings=False`.
    """
    config = AutoConfig.for_model(kind, **{**_BASE, **TARGETS.get(kind, {"num_hidden_layers": 3}), **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        fill(dict(model.named_parameters()), seed)
    model.to(dtype)
    model.generation_config.eos_token_id = [EOS, IM_END]
    model.save_pretrained(path, max_shard_size=max_shard_size)
    if tokenizer:
        write_tokenizer(path)
    return config


def drafter_tensors(config: dict[str, Any], num_taps: int) -> dict[str, Tensor]:
    """Empty tensors under the names and shapes of the authors' checkpoints."""
    H, intermediate, D = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * D, config["num_key_value_heads"] * D
    tensors = {"fc.weight": torch.empty(H, num_taps * H), "hidden_norm.weight": torch.empty(H)}
    tensors["norm.weight"] = torch.empty(H)
    for i in range(config["num_hidden_layers"]):
        layer = f"layers.{i}."
        for name, rows, columns in (("q", q, H), ("k", kv, H), ("v", kv, H), ("o", H, q)):
            tensors[f"{layer}self_attn.{name}_proj.weight"] = torch.empty(rows, columns)
            if config["attention_bias"]:
                tensors[f"{layer}self_attn.{name}_proj.bias"] = torch.empty(rows)
        tensors[f"{layer}self_attn.q_norm.weight"] = torch.empty(D)
        tensors[f"{layer}self_attn.k_norm.weight"] = torch.empty(D)
        tensors[f"{layer}input_layernorm.weight"] = torch.empty(H)
        tensors[f"{layer}post_attention_layernorm.weight"] = torch.empty(H)
        tensors[f"{layer}mlp.gate_proj.weight"] = torch.empty(intermediate, H)
        tensors[f"{layer}mlp.up_proj.weight"] = torch.empty(intermediate, H)
        tensors[f"{layer}mlp.down_proj.weight"] = torch.empty(H, intermediate)
    return tensors if config["architectures"] != ["DFlash2DraftModel"] else tensors | _dflash2_tensors(config)


DFLASH2: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 8,
    "selector_top_k": 6,
}
"""What makes a drafter's config one of DFlash 2."""


def _dflash2_tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    H, t, rank = config["hidden_size"], config["conv_kernel_size"], config["selector_rank"]
    tensors = {"candidate_selector.hidden_projection.weight": torch.empty(rank, H)}
    for name in ("predecessor", "successor"):
        tensors[f"candidate_selector.{name}_codebook"] = torch.empty(config["vocab_size"], rank)
    for i in range(config["num_hidden_layers"]):
        for name in ("attention_conv", "mlp_conv"):
            conv = f"layers.{i}.{name}."
            tensors[f"{conv}base_kernel"] = torch.empty(2, t, H)
            tensors[f"{conv}kernel_projection.weight"] = torch.empty(2 * t * H // config["conv_group_size"], H)
    return tensors


def drafter_config(
    *,
    hidden_size: int = 64,
    layers: int = 2,
    taps: tuple[int, ...] = (0, 2),
    block_size: int = 4,
    mask_token_id: int = 511,
    num_target_layers: int = 4,
    layer_types: list[str] | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    attention_bias: bool = False,
    rope_theta: float = 10000.0,
    rope_scaling: dict[str, Any] | None = None,
    spelling: str = "nested",
    **overrides: Any,
) -> dict[str, Any]:
    """The content of a drafter's config.json.

    Args:
        hidden_size: H.
        layers: Drafter layers.
        taps: `target_layer_ids`.
        block_size: Anchor included.
        mask_token_id: Id of the unknown tokens of a block.
        num_target_layers: What the drafter believes its target has.
        layer_types: Per drafter layer `full_attention` or `sliding_attention`; None leaves the key out.
        sliding_window: Tokens.
        is_causal: None leaves the key out.
        attention_bias: q, k, v and o have biases.
        rope_theta: Base.
        rope_scaling: As Transformers 4 spells it, without theta.
        spelling: Where the movable keys go: `flat` (block size and rope at top level), `nested` (block size in
            dflash_config, rope in rope_parameters), `nested-block`, `nested-rope`.
        overrides: Any further top-level keys; None removes a key.
    """
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": hidden_size,
        "intermediate_size": 128, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": VOCAB_SIZE, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "max_position_embeddings": 512, "num_target_layers": num_target_layers,
        "attention_bias": attention_bias, "tie_word_embeddings": True, "use_sliding_window": bool(layer_types),
        "dtype": "float32",
        "dflash_config": {"target_layer_ids": list(taps), "mask_token_id": mask_token_id},
    }  # fmt: skip
    for key, value in (("layer_types", layer_types), ("sliding_window", sliding_window), ("is_causal", is_causal)):
        if value is not None:
            config[key] = value
    if spelling in ("nested", "nested-block"):
        config["dflash_config"]["block_size"] = block_size
    else:
        config["block_size"] = block_size
    if spelling in ("nested", "nested-rope"):
        config["rope_parameters"] = {"rope_type": "default", **(rope_scaling or {}), "rope_theta": rope_theta}
    else:
        config |= {"rope_theta": rope_theta, "rope_scaling": rope_scaling}
    config |= overrides
    return {key: value for key, value in config.items() if key not in overrides or value is not None}


def write_drafter(
    path: Path,
    target_config: PreTrainedConfig | None = None,
    *,
    seed: int = 1,
    dtype: torch.dtype = torch.float32,
    tensors: dict[str, Tensor] | None = None,
    **config_arguments: Any,
) -> dict[str, Any]:
    """Writes a drafter checkpoint as z-lab publishes them: config.json and model.safetensors.

    Args:
        path: Folder to make.
        target_config: Gives hidden size, vocabulary and layer count; None for the default target's.
        seed: Of the weights.
        dtype: Of the weights.
        tensors: Extra tensors to store, such as a head of its own.
        config_arguments: As `drafter_config` takes them.

    Returns:
        The content of config.json.
    """
    if target_config is not None:
        text = target_config.get_text_config()
        config_arguments = {
            "hidden_size": text.hidden_size, "num_target_layers": text.num_hidden_layers,
            "vocab_size": text.vocab_size, **config_arguments,
        }  # fmt: skip
    config = drafter_config(**config_arguments)
    stored = drafter_tensors(config, len(config_arguments.get("taps", (0, 2))))
    fill(stored, seed)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_file({k: v.to(dtype) for k, v in {**stored, **(tensors or {})}.items()}, path / "model.safetensors")
    return config


def edit_json(path: Path, **changes: Any) -> None:
    """Changes top-level keys of a JSON file; None removes a key."""
    data = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not None or k not in changes}, indent=1))


def favour_few_tokens(path: Path, n: int) -> None:
    """Makes only the first `n` tokens likely, so that a random drafter is accepted now and then.

    All rows of the output head but the first `n` are multiplied by 0.02; in a tied model that is the embedding.
    """
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = next(k for k in ("lm_head.weight", "model.embed_tokens.weight") if k in tensors)
    tensors[name][n:] *= 0.02
    save_file(tensors, file, metadata={"format": "pt"})


def byte_alphabet() -> list[str]:
    """The printable letter that stands for each byte in byte-level BPE (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in plain}
    for shift, byte in enumerate(b for b in range(256) if b not in letters):
        letters[byte] = chr(256 + shift)
    return [letters[byte] for byte in range(256)]


def write_tokenizer(path: Path, chat_template: str = CHAT_TEMPLATE, *, adds_bos: bool = False) -> None:
    """Writes a byte-level BPE tokenizer without merges: token id = byte, then <bos>, <eos>, <|im_end|>.

    Args:
        path: Checkpoint folder.
        chat_template: Content of chat_template.jinja.
        adds_bos: Give it a post-processor that puts <bos> in front of every text.
    """
    path.mkdir(parents=True, exist_ok=True)
    special = {"<bos>": BOS, "<eos>": EOS, "<|im_end|>": IM_END}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    with_bos = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [BOS], "tokens": ["<bos>"]}},
    }
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
        "added_tokens": [{"id": i, "content": text, **flags} for text, i in special.items()],
        "pre_tokenizer": byte_level, "post_processor": with_bos if adds_bos else None, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {letter: byte for byte, letter in enumerate(byte_alphabet())} | special, "merges": [],
        },
    }  # fmt: skip
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>",
        "additional_special_tokens": ["<|im_end|>"], "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "added_tokens_decoder": {str(i): {"content": text, **flags} for text, i in special.items()},
    }  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False, indent=1), encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    (path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": "<bos>", "eos_token": "<eos>", "additional_special_tokens": ["<|im_end|>"]}),
        encoding="utf-8",
    )
    (path / "chat_template.jinja").write_text(chat_template, encoding="utf-8")

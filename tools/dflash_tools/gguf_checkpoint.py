"""Turns a Llama GGUF file into a Hugging Face checkpoint folder, every value exactly as the file means it.

A quantised GGUF value is `scale * integer + minimum` with 16-bit scale and minimum. The product needs more bits
than bf16 or fp16 hold, so the weights are stored as fp32: the only one of the three that keeps them exactly.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from dflash_runtime.errors import CheckpointError

CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of a special token

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_llama_gguf(gguf_path: Path, folder: Path, stop_tokens: tuple[str, ...]) -> None:
    """Writes config.json, generation_config.json, model.safetensors and the tokenizer files.

    Args:
        gguf_path: A GGUF file of architecture `llama` with a byte-level BPE tokenizer.
        folder: Existing folder to write into.
        stop_tokens: Every token that ends an answer; the first one is the tokenizer's own end token.

    Raises:
        CheckpointError: the file is of another architecture, or holds a tensor this converter does not know.
    """
    import gguf
    from safetensors.numpy import save_file

    reader = gguf.GGUFReader(gguf_path)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    if facts["general.architecture"] != "llama":
        raise CheckpointError(
            f"{gguf_path} is of architecture {facts['general.architecture']!r}; this converter reads 'llama'."
        )
    weights = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        weights[hugging_face_name(tensor.name)] = _own_rope_order(tensor.name, values, facts)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    vocabulary: list[str] = facts["tokenizer.ggml.tokens"]
    stop_ids = [vocabulary.index(token) for token in stop_tokens]
    _write_json(folder / "config.json", _config(facts, tied="lm_head.weight" not in weights))
    _write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
            "eos_token_id": stop_ids,
            "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
        },
    )
    _write_tokenizer(folder, facts)


def hugging_face_name(name: str) -> str:
    """The Hugging Face state-dict name of a GGUF tensor.

    Raises:
        CheckpointError: the name is none of a Llama's.
    """
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise CheckpointError(f"The GGUF tensor {name!r} is none of a Llama model's; this converter cannot place it.")
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.weight"


def _own_rope_order(name: str, values: np.ndarray, facts: dict[str, Any]) -> np.ndarray:
    """Undoes GGUF's interleaving of rotary pairs in q and k: rows (head, D/2, 2) back to (head, 2, D/2)."""
    if name.endswith("attn_q.weight"):
        heads = facts["llama.attention.head_count"]
    elif name.endswith("attn_k.weight"):
        heads = facts["llama.attention.head_count_kv"]
    else:
        return values
    rows, columns = values.shape
    pairs = values.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def _config(facts: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": len(facts["tokenizer.ggml.tokens"]),
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": facts["llama.attention.head_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": facts["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "max_position_embeddings": facts["llama.context_length"],
        # the file stores a 32-bit 1e-05; its shortest decimal is the number that was meant
        "rms_norm_eps": float(f"{facts['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_parameters": {"rope_type": "default", "rope_theta": facts["llama.rope.freq_base"]},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
    }


def _write_tokenizer(folder: Path, facts: dict[str, Any]) -> None:
    """Writes tokenizer.json for `tokenizer.ggml.pre = smollm`: single digits, then byte-level BPE, no BOS added."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pre_kind = facts["tokenizer.ggml.pre"]
    if pre_kind != "smollm":
        raise CheckpointError(f"The GGUF file splits text by the rule {pre_kind!r}; this converter knows 'smollm'.")
    vocabulary: list[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in facts["tokenizer.ggml.merges"]]
    unknown = vocabulary[facts["tokenizer.ggml.unknown_token_id"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds: list[int] = facts["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(vocabulary, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": vocabulary[facts["tokenizer.ggml.bos_token_id"]],
            "eos_token": vocabulary[facts["tokenizer.ggml.eos_token_id"]],
            "pad_token": vocabulary[facts["tokenizer.ggml.padding_token_id"]],
            "unk_token": unknown,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": facts["llama.context_length"],
            "chat_template": facts["tokenizer.chat_template"],
        },
    )


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

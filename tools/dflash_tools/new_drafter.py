"""A drafter before and after its training: config, first weights, and the checkpoint in z-lab's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig

from dflash_export.drafter import Drafter
from dflash_export.drafter_config import DrafterConfig, parse_drafter_config
from dflash_export.drafter_weights import EMBEDDING, HEAD, set_parameter
from dflash_runtime.bundle import write_atomically
from dflash_runtime.errors import PairError, UnsupportedModelError

INITIAL_DEVIATION = 0.02
BORROWED = (EMBEDDING, HEAD)


def drafter_config_json(
    target: PreTrainedConfig, *, num_layers: int, block_size: int, layer_ids: list[int], mask_token_id: int
) -> dict[str, Any]:
    """Content of config.json for a drafter whose layers have the target's shape.

    Args:
        target: The target's config.
        num_layers: Decoder layers of the drafter.
        block_size: Anchor included.
        layer_ids: Taps, 0-based target layers.
        mask_token_id: Id of the unknown tokens of a block.

    Raises:
        UnsupportedModelError: the target's config lacks a size that a drafter's layer needs.
    """
    text = target.get_text_config()
    hidden, heads = int(text.hidden_size), int(text.num_attention_heads)
    inner = getattr(text, "intermediate_size", None)
    if not isinstance(inner, int):
        raise UnsupportedModelError(
            f"the target's config ({text.model_type}) states no single intermediate_size, from which the drafter's "
            "layers take theirs."
        )
    head_dim = int(getattr(text, "head_dim", None) or hidden // heads)
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": int(getattr(text, "num_key_value_heads", None) or heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": float(getattr(text, "rms_norm_eps", 1e-6)),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": ["full_attention"] * num_layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_position_embeddings": int(getattr(text, "max_position_embeddings", None) or 4096),
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_base(text)},
        "tie_word_embeddings": False,
        "vocab_size": int(text.vocab_size),
        "num_target_layers": int(text.num_hidden_layers),
        "block_size": block_size,
        "dflash_config": {
            "block_size": block_size, "mask_token_id": mask_token_id, "target_layer_ids": list(layer_ids),
        },
    }  # fmt: skip


def rope_base(text: PreTrainedConfig) -> float:
    """The target's rotary base, 10000 where it has none of its own."""
    found = getattr(text, "rope_parameters", None) or {}
    if "rope_theta" not in found:  # by layer type: full layers are the ones a drafter has
        found = found.get("full_attention") or {}
    return float(found.get("rope_theta") or getattr(text, "rope_theta", None) or 10000.0)


def check_taps(layer_ids: list[int], num_target_layers: int) -> None:
    """Refuses taps the target does not have.

    Raises:
        PairError: naming them.
    """
    outside = [i for i in layer_ids if not 0 <= i < num_target_layers]
    if outside or len(set(layer_ids)) < len(layer_ids) or not layer_ids:
        raise PairError(
            f"--taps {','.join(map(str, layer_ids))}: taps are different layers of the target, which has "
            f"{num_target_layers} (0 to {num_target_layers - 1})."
        )


def make_drafter(config: dict[str, Any], embedding: Tensor, head: Tensor, seed: int) -> Drafter:
    """A drafter with random first weights in fp32, and the target's frozen tables.

    Args:
        config: Content of config.json.
        embedding: The target's raw table [V, H].
        head: The target's output head [V, H].
        seed: The same seed gives the same weights.
    """
    facts: DrafterConfig = parse_drafter_config(config, "the new drafter's config")
    with torch.device("meta"):
        drafter = Drafter(facts, embedding.shape[0])
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(drafter.named_parameters()):
        if name in BORROWED:
            continue
        values = torch.ones(parameter.shape)
        if not name.endswith("norm.weight"):
            values = torch.randn(parameter.shape, generator=generator) * INITIAL_DEVIATION
        set_parameter(drafter, name, nn.Parameter(values))
    set_parameter(drafter, EMBEDDING, nn.Parameter(embedding.detach().float(), requires_grad=False))
    set_parameter(drafter, HEAD, nn.Parameter(head.detach(), requires_grad=False))
    return drafter


def own_parameters(drafter: Drafter) -> dict[str, nn.Parameter]:
    """What is trained: every parameter but the borrowed tables, by the authors' names."""
    return {name: parameter for name, parameter in drafter.named_parameters() if name not in BORROWED}


def round_parameters(drafter: Drafter, dtype: torch.dtype) -> None:
    """Rounds the drafter's own values to those of a checkpoint, in place, so that what is measured is what ships."""
    with torch.no_grad():
        for parameter in own_parameters(drafter).values():
            parameter.copy_(parameter.to(dtype).to(parameter.dtype))


def write_drafter(folder: Path, config: dict[str, Any], drafter: Drafter, dtype: torch.dtype) -> int:
    """Writes config.json and model.safetensors; each appears whole.

    Args:
        folder: Exists.
        config: Content of config.json.
        drafter: With its trained weights.
        dtype: Of the stored weights.

    Returns:
        Parameters written.
    """
    tensors = {name: p.detach().to("cpu", dtype).contiguous() for name, p in own_parameters(drafter).items()}
    temporary = folder / ".model.safetensors.partial"
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.replace(folder / "model.safetensors")
    named = {**config, "dtype": str(dtype).removeprefix("torch.")}
    write_atomically(folder / "config.json", json.dumps(named, indent=2) + "\n")
    return sum(tensor.numel() for tensor in tensors.values())

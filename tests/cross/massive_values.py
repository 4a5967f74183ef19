"""Checkpoints with values that leave fp16's range, which give sensible text all the same in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import favour_few_tokens, write_target
from torch import Tensor
from transformers import PreTrainedConfig

CHANNEL, UNIT = 5, 7


def _edit(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def with_large_residual(folder: Path, reached: float, *, layers: tuple[int, ...] = (0, 1), **sizes: Any
                        ) -> PreTrainedConfig:
    """A target whose residual reaches `reached` in one channel, in equal steps in the MLPs of `layers`.

    As in trained models the channel is the same for every token, and the norms that follow weaken it and strengthen
    the others, so that what the model says depends on the others.
    """
    config = write_target(folder, "llama", mlp_bias=True, dtype=torch.bfloat16, **{"num_hidden_layers": 3, **sizes})

    def change(tensors: dict[str, Tensor]) -> None:
        for layer in layers:
            tensors[f"model.layers.{layer}.mlp.down_proj.bias"][CHANNEL] = reached / len(layers)
        for layer in range(config.num_hidden_layers + 1):
            before = reached * sum(one < layer for one in layers) / len(layers)
            names = ["model.norm"] if layer == config.num_hidden_layers else [
                f"model.layers.{layer}.{name}" for name in ("input_layernorm", "post_attention_layernorm")
            ]  # fmt: skip
            for name in names if before else ():
                weight = tensors[f"{name}.weight"]
                weight *= before / 200
                weight[CHANNEL] = 0.1

    _edit(folder, change)
    favour_few_tokens(folder, 8)  # so that no two tokens are nearly as likely as each other
    return config


def with_large_product(folder: Path, factor: float, **sizes: Any) -> PreTrainedConfig:
    """A target with one MLP unit in layer 1 that reaches some times `factor`; what it adds is as small as before."""
    config = write_target(folder, "llama", dtype=torch.bfloat16, **sizes)

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][UNIT] *= factor
        tensors["model.layers.1.mlp.down_proj.weight"][:, UNIT] /= factor

    _edit(folder, change)
    favour_few_tokens(folder, 8)
    return config


def with_large_values(folder: Path, factor: float) -> PreTrainedConfig:
    """A target whose values, which go into the cache, reach some times `factor` in layer 1."""
    config = write_target(folder, "llama", dtype=torch.bfloat16)

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.self_attn.v_proj.weight"] *= factor
        tensors["model.layers.1.self_attn.o_proj.weight"] /= factor

    _edit(folder, change)
    return config

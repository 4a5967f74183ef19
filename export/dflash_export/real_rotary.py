"""Rotary embeddings that Transformers writes in complex numbers, in real ones: ONNX graphs have no complex type."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# Class of the rotary module -> axis of the heads in the queries its rotation is applied to.
_COMPLEX = {"DeepseekV2RotaryEmbedding": 1, "Llama4TextRotaryEmbedding": 2}


class _RealFrequencies(nn.Module):
    """Stands for the rotary module: [B, S, D / 2, 2], cosine and sine instead of a complex number."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.register_buffer("inv_freq", original.inv_freq, persistent=False)
        self.attention_scaling = original.attention_scaling

    def forward(self, states: Tensor, position_ids: Tensor) -> Tensor:
        """Angles in fp32, whatever the dtype of the states."""
        assert isinstance(self.inv_freq, Tensor)
        angles = position_ids[..., None].float() * self.inv_freq.float()
        table: Tensor = torch.stack([angles.cos(), angles.sin()], dim=-1) * self.attention_scaling
        return table


def make_rotary_real(model: nn.Module) -> None:
    """Replaces the complex rotations of a model.

    The function of the model's file that applies them learns to take real frequencies too; what it does with complex
    ones, of a model that is not traced, stays.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            head_axis = _COMPLEX.get(type(child).__name__)
            if head_axis is not None:
                setattr(module, name, _RealFrequencies(child))
                code: Any = sys.modules[type(child).__module__]
                if not isinstance(code.apply_rotary_emb, _Rotation):
                    code.apply_rotary_emb = _Rotation(code.apply_rotary_emb, head_axis)


class _Rotation:
    """Applies real or complex frequencies to queries and keys."""

    def __init__(self, original: Callable[..., tuple[Tensor, Tensor]], head_axis: int) -> None:
        self.original, self.head_axis = original, head_axis

    def __call__(self, query: Tensor, key: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        if frequencies.is_complex():
            return self.original(query, key, frequencies)
        cosine, sine = frequencies.unsqueeze(self.head_axis).unbind(-1)
        return _rotate(query, cosine, sine), _rotate(key, cosine, sine)


def _rotate(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    real, imaginary = states.float().reshape(*states.shape[:-1], -1, 2).unbind(-1)
    turned = torch.stack([real * cosine - imaginary * sine, real * sine + imaginary * cosine], dim=-1)
    return turned.flatten(-2).type_as(states)

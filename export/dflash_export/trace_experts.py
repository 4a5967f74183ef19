"""What replaces Transformers' mixture-of-experts code while a model is traced.

Its own ways either loop over the experts a text happens to hit, which no static graph can, or gather a copy of the
weights for every token. Here every expert sees every token, in one batched product, and the router's weights pick
the results: no copy of a weight, and a block of 16 tokens touches most experts anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ExpertsInterface

EXPERTS_NAME = "bundle_trace"


def _experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Weighted sum of the chosen experts.

    Args:
        self: The module that holds the experts' weights, [experts, ...].
        hidden_states: [N, H]
        top_k_index: [N, k] chosen experts.
        top_k_weights: [N, k] their weights.

    Returns:
        [N, H]
    """
    first = self.gate_up_proj if self.has_gate else self.up_proj
    first_bias, last_bias = None, None
    if self.has_bias:
        first_bias = self.gate_up_proj_bias if self.has_gate else self.up_proj_bias
        last_bias = self.down_proj_bias
    transposed = bool(self.is_transposed)
    inner = _linear(hidden_states[None], first, first_bias, transposed)  # [experts, N, I or 2I]
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    outer = _linear(inner, self.down_proj, last_bias, transposed)  # [experts, N, H]
    if self.has_post_expert_norm:
        outer = self.post_expert_norm(outer)
    experts = torch.arange(outer.shape[0])
    chosen = top_k_index[:, :, None] == experts  # [N, k, experts]
    weights = torch.where(chosen, top_k_weights[:, :, None], 0.0).sum(1)  # [N, experts]
    # A selection, not a product with 0: an expert that was not asked may overflow.
    picked = torch.where(chosen.any(1).T[:, :, None], outer * weights.T[:, :, None], 0.0)
    total: Tensor = picked.sum(0).to(hidden_states.dtype)
    return total


def _linear(states: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    # Where a transpose is due, the few states are turned and not the big weight.
    product = states @ weight if transposed else (weight @ states.transpose(1, 2)).transpose(1, 2)
    return product if bias is None else product + bias[:, None, :]


ExpertsInterface.register(EXPERTS_NAME, _experts)

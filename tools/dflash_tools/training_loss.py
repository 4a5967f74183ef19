"""Weighted cross-entropy through a frozen output head, without ever holding all logits.

The head is by far the largest matrix a small drafter meets. Its gradient is not wanted, so the gradient of the
hidden rows is made in the same pass as the loss, a slice of rows at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MAX_LOGITS = 1 << 25
"""Logits held at once."""


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        gradient = torch.empty_like(hidden)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for part in _slices(len(labels), head.shape[0]):
            logits = (hidden[part].to(head.dtype) @ head.T).float()
            chances = logits.log_softmax(-1)
            picked = labels[part, None]
            total -= (chances.gather(1, picked)[:, 0] * weights[part]).sum()
            chances.exp_().scatter_add_(1, picked, torch.full_like(picked, -1, dtype=chances.dtype))
            chances *= weights[part, None]
            gradient[part] = (chances.to(head.dtype) @ head).to(hidden.dtype)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0], None, None, None


def head_loss(hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Sum of weight times cross-entropy, in fp32.

    Args:
        hidden: [R, H] rows after the drafter's final norm.
        head: [V, H] the frozen head, in the dtype of its products.
        labels: [R] true tokens.
        weights: [R]; rows of weight 0 cost nothing.
    """
    asked = weights > 0
    with torch.autocast(hidden.device.type, enabled=False):
        loss: Tensor = _HeadLoss.apply(  # type: ignore[no-untyped-call]
            hidden[asked].float(), head, labels[asked], weights[asked]
        )
    return loss


@torch.no_grad()
def best_tokens(hidden: Tensor, head: Tensor) -> Tensor:
    """[R] the token with the largest logit of each row of hidden [R, H]."""
    parts = [(hidden[part].to(head.dtype) @ head.T).argmax(-1) for part in _slices(len(hidden), head.shape[0])]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.long, device=hidden.device)


def _slices(rows: int, vocab_size: int) -> list[slice]:
    size = max(1, MAX_LOGITS // vocab_size)
    return [slice(start, start + size) for start in range(0, rows, size)]

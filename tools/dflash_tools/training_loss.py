"""Weighted cross-entropy through a frozen output head, without ever holding all logits.

The head is by far the largest matrix a small drafter meets. Its gradient is not wanted, so the gradient of the
hidden rows is made in the same pass as the loss, a slice of rows at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dflash_tools.training_head_rows import HeadRows

MAX_LOGITS = {"cpu": 1 << 23}
"""Logits held at once by kind of device: few enough to stay in a CPU's cache from one pass over them to the next."""
_MAX_LOGITS_ELSEWHERE = 1 << 25


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor, num_drawn: int, log_weight: float
    ) -> Tensor:
        gradient = torch.empty_like(hidden)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for part in _slices(labels, head.shape[0]):
            picked = labels[part, None]
            logits = hidden[part].to(head.dtype) @ head.T
            logits[:, len(head) - num_drawn :] += log_weight
            chances = torch.softmax(logits, -1, dtype=torch.float32)
            right = chances.gather(1, picked)
            # A chance below fp32's range counts as the smallest one there is; its gradient is exact all the same.
            total -= (right.clamp_min(torch.finfo(right.dtype).tiny).log()[:, 0] * weights[part]).sum()
            # The label's own part in fp32: rounded to bf16, a chance near 1 would leave nothing of its distance to 1.
            others = (chances.scatter_(1, picked, 0.0).to(head.dtype) @ head).float()
            gradient[part] = (others + (right - 1) * head[labels[part]].float()) * weights[part, None]
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0], None, None, None, None, None


def head_loss(hidden: Tensor, head: HeadRows, labels: Tensor, weights: Tensor) -> Tensor:
    """Sum of weight times cross-entropy, in fp32.

    Args:
        hidden: [R, H] rows after the drafter's final norm.
        head: The frozen head, in the dtype of its products.
        labels: [R] true tokens.
        weights: [R]; rows of weight 0 cost nothing.
    """
    asked = weights > 0
    with torch.autocast(hidden.device.type, enabled=False):
        loss: Tensor = _HeadLoss.apply(  # type: ignore[no-untyped-call]
            hidden[asked].float(), head.matrix, head.of(labels[asked]), weights[asked], head.num_drawn,
            head.drawn_log_weight,
        )
    return loss


@torch.no_grad()
def best_tokens(hidden: Tensor, head: Tensor) -> Tensor:
    """[R] the token with the largest logit of each row of hidden [R, H]."""
    parts = [(hidden[part].to(head.dtype) @ head.T).argmax(-1) for part in _slices(hidden, head.shape[0])]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.long, device=hidden.device)


def _slices(rows: Tensor, vocab_size: int) -> list[slice]:
    size = max(1, MAX_LOGITS.get(rows.device.type, _MAX_LOGITS_ELSEWHERE) // vocab_size)
    return [slice(start, start + size) for start in range(0, len(rows), size)]

"""Which tokens a drafter of PyTorch chooses, and how near the next best ones come: plain, mapped, or by a selector."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_export.drafter import Drafter, proposals_by_definition
from dflash_tools.reference_tensors import CHOICE_IDS, CHOICE_SCORES, TOP_COUNT, Tensors


@torch.no_grad()
def choices(drafter: Drafter, hidden: Tensor, logits: Tensor, anchor: int) -> Tensors:
    """The proposals of a block, and the scores they were chosen by.

    Args:
        drafter: With real weights.
        hidden: [1, b, H] after the final norm.
        logits: [1, b - 1, V] in fp32.
        anchor: Token id.

    Returns:
        `draft_ids` [b - 1, 1], and the best candidates of each slot with their scores, best first.
    """
    first = torch.tensor([[anchor]])
    chosen = proposals_by_definition(drafter, hidden, logits, first)
    if drafter.config.dflash2 is not None:
        before = torch.cat((first, chosen[:, :-1]), dim=1).unsqueeze(2)
        ids, scores = drafter.candidate_selector.scores(hidden[:, 1:], logits, before)
        ids, scores = ids[0], scores[0, :, 0]
    else:
        scores, ids = logits[0].topk(min(TOP_COUNT, logits.shape[-1]), dim=-1)
        ids = ids if drafter.target_ids is None else drafter.target_ids[ids]
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return {
        "draft_ids": chosen[0].unsqueeze(1).numpy(),
        CHOICE_IDS: ids.gather(1, order).numpy(),
        CHOICE_SCORES: scores.gather(1, order).float().numpy(),
    }

"""Drafter windows that are too wide to fill by running: one draft over context rows that are given, made of noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dflash_export.deviation import Worst, deviation
from dflash_export.drafter import Drafter, draft_on_context, proposals_by_definition
from dflash_export.graph_runner import GraphRunner
from dflash_export.parity import EXACT_TOLERANCE
from dflash_export.piecewise_runner import PiecewiseGraph
from dflash_export.window_gate import EDGE_ROWS, EDGE_VALUE
from dflash_runtime.bundle import CheckRow, StateTensor

Form = Literal["exact", "half", "lowered"]
"""Of a graph that is run: in fp32, rounded to its own dtype, or in fp32 as the backend is given it."""
OpenDraft = Callable[[Form, int], GraphRunner | PiecewiseGraph]
"""Opens the draft graph in a form, with caches of so many rows."""
_SEED = 59


def check_drafter_windows(
    drafter: Drafter,
    state: Sequence[StateTensor],
    input_ids: Tensor,
    widths: Sequence[int],
    max_context_tokens: int,
    open_draft: OpenDraft,
    forms: Sequence[Form],
) -> list[CheckRow]:
    """Crosses the edge of every window: the block begins where its first queries see the first row and its last do not.

    Args:
        drafter: In fp32, with the bundle's weights.
        state: The draft graph's caches.
        input_ids: [1, b] anchor, then mask ids.
        widths: Windows to cross, in tokens.
        max_context_tokens: No block begins later than its end allows.
        open_draft: Of the graph to be compared.
        forms: Given to `open_draft`: `exact`, and `lowered` where the graph is lowered.

    Returns:
        Rows of stage `portable` and `lowered`; none without widths.
    """
    rows: list[CheckRow] = []
    b = input_ids.shape[1]
    for width in widths:
        position = max(1, min(width - 2, max_context_tokens - b))
        context = _noise(state, position)
        hidden, logits = draft_on_context(drafter, list(zip(context[0::2], context[1::2], strict=True)), input_ids)
        proposed = proposals_by_definition(drafter, hidden, logits, input_ids[:, :1])
        for form in forms:
            draft = open_draft(form, position + b + 4)
            for tensor, cache in zip(state, context, strict=True):
                draft.state[tensor.input][:, :, :position] = cache.numpy()
            found = draft.run(input_ids=input_ids.numpy(), position=np.array([position]))
            worst = Worst()
            worst.add(f"window {width} draft_logits", deviation(found["draft_logits"], logits.float().numpy()))
            worst.add(f"window {width} draft_ids", float((found["draft_ids"] != proposed.numpy()).sum()))
            covered = f"window of {width}: a block of {b} after {position} given rows"
            rows += worst.rows("portable" if form == "exact" else form, EXACT_TOLERANCE, covered)
    return rows


def _noise(state: Sequence[StateTensor], position: int) -> list[Tensor]:
    """Keys and values [1, kv_heads, position, D], layer by layer; values about the edge are large."""
    generator = torch.Generator().manual_seed(_SEED)
    rows = [torch.randn(1, int(t.shape[1]), position, int(t.shape[3]), generator=generator) for t in state]
    for values in rows[1::2]:
        values[:, :, :EDGE_ROWS] *= EDGE_VALUE
    return rows

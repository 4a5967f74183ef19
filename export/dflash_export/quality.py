"""What quantisation costs in terms a user cares about: perplexity on a fixed text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dflash_runtime.bundle import CheckRow

TEXT_FILE = Path(__file__).parent / "shipped" / "perplexity.txt"
"""Prose, facts, questions and answers, and code; written for this purpose."""
WINDOW_TOKENS = 512
QUALITY_LIMIT = 2.0
"""A build is refused whose quantised model has more than this many times the original's perplexity, or accepts less
than the original's tokens a round by this factor."""
_ROWS = 64

Logits = Callable[[Sequence[int], int], npt.NDArray[np.float32]]
"""Token ids and the position of the first -> logits [n, V]; position 0 begins anew."""


def text_windows(tokenizer_file: Path, vocab_size: int, max_context_tokens: int) -> list[list[int]]:
    """The fixed text in token ids, in windows that fit the context; empty without a tokenizer for this vocabulary."""
    if not tokenizer_file.is_file():
        return []
    from tokenizers import Tokenizer

    ids = list(Tokenizer.from_file(str(tokenizer_file)).encode(TEXT_FILE.read_text(encoding="utf-8")).ids)
    if not ids or max(ids) >= vocab_size:
        return []
    size = min(WINDOW_TOKENS, max_context_tokens)
    return [window for window in (ids[i : i + size] for i in range(0, len(ids), size)) if len(window) > 1]


def perplexity(windows: Sequence[Sequence[int]], logits: Logits) -> float:
    """The exponential of the mean negative log likelihood of every token but the first of each window.

    Args:
        windows: Token ids, at least one window.
        logits: The model.
    """
    total, count = 0.0, 0
    for window in windows:
        for start in range(0, len(window), _ROWS):
            ids = window[start : start + _ROWS]
            rows = logits(ids, start).astype(np.float64)
            wanted = np.array(window[start + 1 : start + 1 + len(ids)])
            rows = rows[: len(wanted)]
            rows -= rows.max(-1, keepdims=True)
            likelihood = rows[np.arange(len(wanted)), wanted] - np.log(np.exp(rows).sum(-1))
            total, count = total - float(likelihood.sum()), count + len(wanted)
    return math.exp(total / count)


def perplexity_row(tensor: str, original: float, found: float, tokens: int, whose: str) -> CheckRow:
    """One line of the table: how many times the original's perplexity, and both numbers in words."""
    ratio = found / original
    words = f"{tokens} tokens of a fixed text: {original:.2f} of the original, {found:.2f} {whose}"
    return CheckRow("quality", tensor, ratio, QUALITY_LIMIT, ratio <= QUALITY_LIMIT, words)


def acceptance_row(block_size: int, original: float, found: float, texts: str) -> CheckRow:
    """One line of the table: how many times the quantised pair's tokens a round the original commits."""
    ratio = original / found
    words = f"{texts}: {original:.2f} tokens a round of the original, {found:.2f} quantised"
    tensor = f"acceptance length, block {block_size}"
    return CheckRow("quality", tensor, ratio, QUALITY_LIMIT, ratio <= QUALITY_LIMIT, words)

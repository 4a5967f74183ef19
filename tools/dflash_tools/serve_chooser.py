"""Chooses tokens as the runtime does, keeps their probabilities, and stays within a grammar.

Both look at the text before a place and at the target's logits alone, so an answer is the same whatever was drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dflash_runtime.decode import accept
from dflash_runtime.generation import GenerationConfig
from dflash_runtime.sampling import TokenChooser
from dflash_tools.serve_jobs import ScoredToken

Logits = npt.NDArray[np.float32]


class Grammar(Protocol):
    """What may come next."""

    def rule_out(self, logits: Logits, proposed: Sequence[int]) -> Logits:
        """[rows, V] with a score far below all others for tokens that may not come; a copy."""

    def take(self, tokens: Sequence[int]) -> None:
        """Moves behind tokens that were committed."""


class ServedChooser(TokenChooser):
    """The chooser of one answer.

    Args:
        sampling: As in `TokenChooser`.
        prompt: As there.
        vocab_size: As there.
        top_logprobs: Alternatives to keep with each token; None keeps no probabilities.
        grammar: What the answer must follow.
    """

    def __init__(self, sampling: GenerationConfig, prompt: Sequence[int], vocab_size: int, *, top_logprobs: int | None,
                 grammar: Grammar | None) -> None:
        super().__init__(sampling, prompt, vocab_size)
        self._top_logprobs, self._grammar = top_logprobs, grammar
        self._waiting: list[ScoredToken] = []  # of the last call, not committed yet
        self.scored: list[ScoredToken] = []
        """Of every committed token, in order; empty where no probabilities are wanted."""

    def choose(self, logits: Logits, proposed: Sequence[int], position: int) -> list[int]:
        """See `TokenChooser.choose`."""
        allowed = logits if self._grammar is None else self._grammar.rule_out(logits, proposed)
        chosen = super().choose(allowed, proposed, position)
        if self._top_logprobs is not None:
            taken = accept(proposed, chosen)
            self._waiting = [_score(row, token, self._top_logprobs) for row, token in zip(logits, taken, strict=False)]
        return chosen

    def commit(self, tokens: Sequence[int]) -> None:
        """See `TokenChooser.commit`."""
        super().commit(tokens)
        self.scored += self._waiting[: len(tokens)]
        if self._grammar is not None:
            self._grammar.take(tokens)


def _score(row: Logits, token: int, top: int) -> ScoredToken:
    scores = row.astype(np.float64)
    highest = scores.max()
    logprobs = scores - highest - np.log(np.exp(scores - highest).sum())
    best: list[int] = []
    if top:
        likeliest = np.argpartition(logprobs, -top)[-top:]
        best = likeliest[np.argsort(-logprobs[likeliest], kind="stable")].tolist()
    return ScoredToken(token, float(logprobs[token]), [(other, float(logprobs[other])) for other in best])

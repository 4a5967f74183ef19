"""Which token follows a row of logits: penalties, filters and noise, in the order of Transformers' `generate`.

Noise depends on the seed and on the token's place in the text alone (Gumbel-max with a counter-based generator). The
token of a place is thus the same whoever proposed what: a proposal is kept while it equals the token drawn, the
distribution is exactly the target's, and the text is that of plain decoding with the same seed.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_runtime.errors import PromptError

Scores = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen. The defaults are greedy decoding."""

    temperature: float = 0.0
    """0 takes the likeliest token; 1 samples the target's own distribution."""
    top_k: int = 0
    """Keep the k likeliest tokens and those equal to the last of them; 0 keeps all."""
    top_p: float = 1.0
    """Keep the fewest likeliest tokens that have this much probability together."""
    min_p: float = 0.0
    """Keep tokens at least this times as likely as the likeliest."""
    repetition_penalty: float = 1.0
    """Divides the positive scores of tokens in prompt and answer, multiplies the negative ones."""
    presence_penalty: float = 0.0
    """Taken once from the score of every token in the answer."""
    frequency_penalty: float = 0.0
    """Taken from the score of a token for each time it is in the answer."""
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """Token id -> what is added to its score."""
    seed: int | None = None
    """Equal seeds give equal texts; None draws one."""

    def check_sampling(self, vocab_size: int) -> None:
        """Raises PromptError for the first option that makes no sense."""
        limits: dict[str, tuple[float, float]] = {
            "temperature": (0, math.inf), "top_p": (1e-9, 1), "min_p": (0, 1), "repetition_penalty": (1e-9, math.inf),
            "presence_penalty": (-math.inf, math.inf), "frequency_penalty": (-math.inf, math.inf),
        }  # fmt: skip
        for name, (low, high) in limits.items():
            value: Any = getattr(self, name)
            if not isinstance(value, (int, float)) or not math.isfinite(value) or not low <= value <= high:
                raise PromptError(f"{name} is {value!r} and must be a number from {low:g} to {high:g}.")
        for name in ("top_k", "seed"):
            value = getattr(self, name) or 0
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
                raise PromptError(f"{name} is {value!r} and must be a whole number from 0 on.")
        for token, bias in self.logit_bias.items():
            if not 0 <= token < vocab_size or math.isnan(bias):
                raise PromptError(f"logit_bias has {token}: {bias}; ids go from 0 to {vocab_size - 1}.")

    @property
    def needs_logits(self) -> bool:
        """Whether the graph's own argmax is not enough."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1)
        return self.temperature > 0 or any(penalties) or bool(self.logit_bias)


class TokenChooser:
    """Chooses the tokens of one request.

    Args:
        sampling: How.
        prompt: The request's tokens so far.
        vocab_size: Tokens the target has scores for.
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int], vocab_size: int) -> None:
        self._sampling = sampling
        self.seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        self._seen = np.zeros(vocab_size, np.bool_)
        self._seen[list(prompt)] = True
        self._answered = np.zeros(vocab_size, np.int32)
        self._bias_ids = np.array(list(sampling.logit_bias), np.int64)
        self._biases = np.array(list(sampling.logit_bias.values()), np.float64)

    def commit(self, tokens: Sequence[int]) -> None:
        """Takes tokens into the answer."""
        np.add.at(self._answered, list(tokens), 1)

    def choose(self, logits: npt.NDArray[np.float32], proposed: Sequence[int], position: int) -> list[int]:
        """The token after the committed text, and after each proposal as if all before it were committed.

        Args:
            logits: [proposals + 1, V], the target's scores.
            proposed: Tokens that may come next.
            position: Place in the text of the token that row 0 chooses.

        Returns:
            Token ids; -1 for a row with NaN or infinity.
        """
        chosen = []
        for i, row in enumerate(logits):
            chosen.append(self._choose(row, position + i))
            if i < len(proposed):
                self._answered[proposed[i]] += 1
        np.subtract.at(self._answered, list(proposed), 1)
        return chosen

    def _choose(self, row: npt.NDArray[np.float32], position: int) -> int:
        if not np.isfinite(row).all():
            return -1
        sampling, scores = self._sampling, self._penalised(row)
        if sampling.temperature == 0:
            return int(scores.argmax())
        kept = _filtered(scores / sampling.temperature, sampling)
        # Seed and place are the key: as counters, neighbouring places would share their noise, moved by a few words.
        noise: Scores = np.random.Generator(np.random.Philox(key=[self.seed, position])).gumbel(size=len(row))
        return int(kept[0][(kept[1] + noise[kept[0]]).argmax()])

    def _penalised(self, row: npt.NDArray[np.float32]) -> Scores:
        sampling, scores = self._sampling, row.astype(np.float64)
        scores[self._bias_ids] += self._biases
        if sampling.repetition_penalty != 1:
            seen = self._seen | (self._answered > 0)
            factor = sampling.repetition_penalty
            scores[seen] = np.where(scores[seen] < 0, scores[seen] * factor, scores[seen] / factor)
        if sampling.frequency_penalty or sampling.presence_penalty:
            scores -= sampling.frequency_penalty * self._answered + sampling.presence_penalty * (self._answered > 0)
        return scores


def _filtered(scores: Scores, sampling: Sampling) -> tuple[npt.NDArray[np.int64], Scores]:
    """Ids and scores that top-k, top-p and min-p leave, one after the other."""
    ids = np.arange(scores.shape[0])
    if 0 < sampling.top_k < scores.shape[0]:
        ids = np.flatnonzero(scores >= np.partition(scores, -sampling.top_k)[-sampling.top_k])
    if sampling.top_p < 1:
        order = ids[np.argsort(scores[ids], kind="stable")]
        left = np.cumsum(_probabilities(scores[order])) > 1 - sampling.top_p
        left[-1] = True
        ids = np.sort(order[left])
    if sampling.min_p > 0:
        probabilities = _probabilities(scores[ids])
        ids = ids[probabilities >= sampling.min_p * probabilities.max()]
    return ids, scores[ids]


def _probabilities(scores: Scores) -> Scores:
    powers: Scores = np.exp(scores - scores.max())
    total: Scores = powers / powers.sum()
    return total

"""Which token follows a row of logits: penalties, filters and noise, in the order of Transformers' `generate`.

Noise depends on the seed and on the token's place in the text alone (Gumbel-max with a counter-based generator). The
token of a place is thus the same whoever proposed what: a proposal is kept while it equals the token drawn, the
distribution is exactly the target's, and the text is that of plain decoding with the same seed.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dflash_runtime.sampling_config import Sampling

Scores = npt.NDArray[np.float64]


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

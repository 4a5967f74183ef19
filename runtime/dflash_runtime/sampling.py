"""Which token follows a row of logits: penalties, filters and noise, in the order of Transformers' `generate`.

Noise depends on the seed, on the token's place in the text and on its id alone (Gumbel-max). The token of a place is
thus the same whoever proposed what: a proposal is kept while it equals the token drawn, the distribution is exactly the
target's, and the text is that of plain decoding with the same seed. So it is too where proposals are drawn from the
drafter with the same noise. Drawn with noise of their own, they are kept by rejection sampling: with the chance p / q,
and what follows a rejection is drawn from what p has more than q. The distribution is the target's again, the text
another one.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_runtime.backend import Backend, CandidateSource
from dflash_runtime.generation import GenerationConfig

Array = npt.NDArray[Any]
Kept = tuple[Array, Array]
"""Ids that a token is drawn from, and the logarithms of their probabilities, up to a constant."""
_ERROR = 1e-4
"""Share by which a device's sum over a row may be off."""
_STEP, _FIRST, _SECOND = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)


class TokenChooser:
    """Chooses the tokens of one request.

    Args:
        sampling: How.
        prompt: The request's tokens so far.
        vocab_size: Tokens the target has scores for.
    """

    def __init__(self, sampling: GenerationConfig, prompt: Sequence[int], vocab_size: int) -> None:
        self._sampling = sampling
        self.seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        (self._key,) = _random(np.zeros(1, np.uint64), np.uint64(self.seed))
        self._seen = np.zeros(vocab_size, np.bool_)
        self._seen[list(prompt)] = True
        self._answered = np.zeros(vocab_size, np.int32)
        self._bias = np.zeros(vocab_size)
        self._bias[list(sampling.logit_bias)] = list(sampling.logit_bias.values())
        self._drafted: dict[int, Kept] = {}  # place -> what its proposal was drawn from, for rejection sampling

    def commit(self, tokens: Sequence[int]) -> None:
        """Takes tokens into the answer."""
        np.add.at(self._answered, list(tokens), 1)

    def propose(self, backend: Backend, likeliest: list[int], position: int) -> list[int]:
        """What to propose: the drafter's likeliest tokens, or others drawn where the request asks for it.

        Args:
            backend: Has just drafted.
            likeliest: The tokens it named.
            position: Place in the text of the first.

        Returns:
            As many tokens; fewer where the drafter's scores are not finite.
        """
        self._drafted, chosen, answered = {}, list[int](), self._answered.copy()
        if not likeliest or self._sampling.temperature == 0 or self._sampling.proposals == "argmax":
            return likeliest
        for place, kept in enumerate(self._draft_rows(backend, len(likeliest), chosen), position):
            if kept is None:
                break
            coupled = self._sampling.proposals == "coupled"
            chosen.append(_draw(kept, self._keys(place)[0 if coupled else 1]))
            self._answered[chosen[-1]] += 1
            if not coupled:
                self._drafted[place] = kept
        self._answered = answered
        return chosen

    def decide(self, backend: Backend, rows: int, proposed: Sequence[int], position: int) -> list[int]:
        """`choose` by what the backend scored last; of a device as little is fetched as is enough."""
        own_way = type(self).choose is not TokenChooser.choose
        if own_way or self._sampling.needs_full_rows or not isinstance(backend, CandidateSource):
            return self.choose(backend.outputs("target", rows)["logits"], proposed, position)
        return self._follow(self._candidate_rows(backend, rows), proposed, position)

    def choose(self, logits: Array, proposed: Sequence[int], position: int) -> list[int]:
        """The token after the committed text, and after each proposal as if all before it were committed.

        Args:
            logits: [proposals + 1, V], the target's scores.
            proposed: Tokens that may come next, as `propose` gave them.
            position: Place in the text of the token that row 0 chooses.

        Returns:
            Token ids up to the first that is not the one proposed; -1 for a row with NaN or infinity.
        """
        return self._follow(map(self._kept, logits), proposed, position)

    def _follow(self, rows: Iterable[Kept | None], proposed: Sequence[int], position: int) -> list[int]:
        chosen, answered = list[int](), self._answered.copy()
        for i, kept in enumerate(rows):  # one by one: the penalties of a row are those of the proposals before it
            chosen.append(-1 if kept is None else self._accept_or_draw(kept, position + i, proposed[i : i + 1]))
            if chosen[i : i + 1] != list(proposed[i : i + 1]):
                break
            self._answered[chosen[i]] += 1
        self._answered = answered
        return chosen

    def _accept_or_draw(self, kept: Kept, place: int, proposed: Sequence[int]) -> int:
        keys, (ids, scores) = self._keys(place), kept
        if place in self._drafted:
            (draft_ids, draft_scores), p, q = self._drafted[place], _probabilities(scores), np.zeros(len(self._seen))
            q[draft_ids] = _probabilities(draft_scores)
            if float(keys[2]) / 2**64 * q[proposed[0]] < p[ids == proposed[0]].sum():
                return proposed[0]
            scores = _left(p, q[ids])
        return _draw((ids, scores), keys[0])

    def _keys(self, place: int) -> Array:
        """Of the noise of the target's token, of that of the proposal, and what decides whether that is kept."""
        return _random(np.arange(3 * place, 3 * place + 3).astype(np.uint64), self._key)

    def _kept(self, row: Array, ids: Array | None = None) -> Kept | None:
        """What may follow by a row of scores, of all tokens or of the `ids` given; None where it is not finite."""
        if not np.isfinite(row).all():
            return None
        sampling, answered = self._sampling, self._answered > 0
        scores = np.full(len(answered), -np.inf)
        scores[slice(None) if ids is None else ids] = row
        scores += self._bias
        if (factor := sampling.repetition_penalty) != 1:
            seen = self._seen | answered
            scores[seen] = np.where(scores[seen] < 0, scores[seen] * factor, scores[seen] / factor)
        scores -= sampling.frequency_penalty * self._answered + sampling.presence_penalty * answered
        if sampling.temperature == 0:
            return np.atleast_1d(scores.argmax()), np.zeros(1)
        scores = _cooled(scores, sampling)
        kept = np.flatnonzero(scores >= _least(scores, sampling))
        return kept, scores[kept]

    def _candidate_rows(self, source: CandidateSource, rows: int) -> Iterator[Kept | None]:
        """Rows as `_kept` gives them, by a device's candidates where these are shown to be enough."""
        sampling, logits = self._sampling, None
        for i, (ids, values, total) in enumerate(zip(*source.candidates(rows, sampling.temperature), strict=True)):
            scores = _cooled(values, sampling)
            low, high = (_least(scores, sampling, total * share) for share in (1 + _ERROR, 1 - _ERROR))
            if np.isfinite(total) and scores.min() < low == high:  # others are at most as likely as the last of these
                yield ids[scores >= low], scores[scores >= low]
            else:
                logits = source.outputs("target", rows)["logits"] if logits is None else logits
                yield self._kept(logits[i])

    def _draft_rows(self, backend: Backend, rows: int, chosen: Sequence[int]) -> Iterator[Kept | None]:
        """What proposals are drawn from, one after the other: `chosen` grows in between."""
        found = backend.outputs("drafter", rows)
        for i in range(rows):
            if "draft_edges" not in found:
                yield self._kept(found["draft_logits"][i], *found.get("draft_vocabulary", ()))
                continue
            # DFlash 2 scores a few candidates for each that may stand before them; before the first is the anchor.
            ids, edges = found["draft_candidates"], found["draft_edges"][i]
            scores = edges[ids[i - 1].tolist().index(chosen[-1]) if i else 0]
            yield (ids[i], _cooled(scores, self._sampling)) if np.isfinite(scores).all() else None


def _cooled(scores: Array, sampling: GenerationConfig) -> Array:
    """Divided by the temperature; the largest is 0."""
    return (scores.astype(np.float64) - float(scores.max())) / sampling.temperature


def _least(scores: Array, sampling: GenerationConfig, total: float | None = None) -> float:
    """The smallest score that top-k, top-p and min-p leave, one after the other, of cooled ones.

    `total` is the sum of the powers of all scores, where more tokens have one than are given.
    """
    if 0 < sampling.top_k < len(scores):
        scores, total = scores[scores >= np.partition(scores, -sampling.top_k)[-sampling.top_k]], None
    least = float(scores.min())
    if sampling.top_p < 1:
        ranked = np.sort(scores)[::-1]
        sums = np.exp(ranked).cumsum()
        last = int(np.searchsorted(sums, sampling.top_p * (sums[-1] if total is None else total)))
        least = float(ranked[min(last, len(ranked) - 1)])
    return max(least, np.log(sampling.min_p)) if sampling.min_p else least


def _left(p: Array, q: Array) -> Array:
    """Logarithms of what a token is drawn from where one drawn from `q` was rejected."""
    with np.errstate(divide="ignore"):  # where the two differ by rounding alone, nothing may be left but p
        return np.asarray(np.log(np.maximum(p - q, 1e-300 * p)))


def _draw(kept: Kept, key: np.uint64) -> int:
    """The token whose logarithm and noise are the largest together."""
    ids, scores = kept
    uniform = ((_random(ids.astype(np.uint64), key) >> np.uint64(12)) + 0.5) / 2**52  # neither 0 nor 1
    return int(ids[(scores - np.log(-np.log(uniform))).argmax()])


def _random(numbers: Array, seed: np.uint64) -> Array:
    """Of the sequence that SplitMix64 (Steele, Lea and Flood, 2014) makes of a seed, those with these numbers."""
    bits: Array = (numbers + np.uint64(1)) * _STEP + seed
    bits = (bits ^ (bits >> np.uint64(30))) * _FIRST
    bits = (bits ^ (bits >> np.uint64(27))) * _SECOND
    return np.asarray(bits ^ (bits >> np.uint64(31)))


def _probabilities(scores: Array) -> Array:
    powers = np.exp(scores)
    return np.asarray(powers / powers.sum())

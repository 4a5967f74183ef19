"""Drafted text has the target's distribution, whatever is proposed and filtered; every known way to bend it shows.

Most of it is exact: the noise is taken out, and what the chooser would draw from is added up over all proposals. What
is left, the noise, is tested by samples enough to see a distortion of 2 %.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import pytest
from planted_biases import OneSided, SoftmaxForArgmax, WrongRow, not_renormalised
from slow_distribution import FILTERS, LIMIT, Scores, expected, surprise

from dflash_runtime import GenerationConfig, sampling
from dflash_runtime.sampling import TokenChooser

V, PLACE = 7, 20
RANDOM = np.random.default_rng(8)
TARGET = (RANDOM.normal(size=(3, V)) * 1.5).astype(np.float32)
DRAFT = (TARGET[:2] * 0.5 + RANDOM.normal(size=(2, V))).astype(np.float32)
PROMPT = (1, 2)
KINDS = ["argmax", "coupled", "sampled"]


class Backend:
    """A target and a drafter whose scores do not depend on the text: what a place is drawn from is known."""

    def outputs(self, kind: Literal["target", "drafter"], rows: int) -> dict[str, Any]:
        return {"logits": TARGET[:rows]} if kind == "target" else {"draft_logits": DRAFT[:rows]}


IDS = np.array([2, 5, 0, 3, 6])
"""Tokens of a drafter with a vocabulary of its own."""
CANDIDATES = np.argsort(-TARGET[:2])[:, [1, 0, 4]]
EDGES = (TARGET[np.arange(2)[:, None], CANDIDATES][:, None] * 0.5 + RANDOM.normal(size=(2, 3, 3))).astype(np.float32)
"""A DFlash 2 selector's scores of a slot's candidates behind each of the slot before; the first row is the anchor's."""


class FewTokens(Backend):
    """Its drafter knows a part of the vocabulary."""

    def outputs(self, kind: Literal["target", "drafter"], rows: int) -> dict[str, Any]:
        found = super().outputs(kind, rows)
        return found if kind == "target" else {"draft_logits": DRAFT[:rows, IDS], "draft_vocabulary": IDS[None]}


class Selector(Backend):
    """Its drafter scores a few candidates for each that may stand before them."""

    def outputs(self, kind: Literal["target", "drafter"], rows: int) -> dict[str, Any]:
        found = super().outputs(kind, rows)
        return found if kind == "target" else {"draft_candidates": CANDIDATES[:rows], "draft_edges": EDGES[:rows]}


class Noiseless:
    """A chooser whose noise is what a test says, and which tells what it would have drawn from."""

    def __init__(self, patch: pytest.MonkeyPatch, options: dict[str, Any], kind: str,
                 make: type[TokenChooser] = TokenChooser, backend: Backend | None = None) -> None:
        self.backend: Any = backend or Backend()
        given = {"temperature": 1.0, "seed": 1, "proposals": kind, **options}
        self.chooser = make(GenerationConfig(**given), PROMPT, V)
        self.drawn: list[Scores] = []
        self.say: list[int] = []
        self.numbers: list[float] = [0.0] * 3
        patch.setattr(sampling, "_draw", self._draw)
        patch.setattr(make, "_keys", lambda chooser, place: [0, 0, self.numbers[place - PLACE] * 2.0**64])

    def _draw(self, kept: Any, key: int) -> int:
        ids, scores = kept
        weights = np.zeros(V)
        weights[ids] = np.exp(scores - scores.max())
        self.drawn.append(weights / weights.sum())
        return self.say.pop(0) if self.say else int(ids[scores.argmax()])

    def propose(self, tokens: list[int]) -> list[Scores]:
        """Makes the drafter say these tokens; returns what they are drawn from."""
        self.say, self.drawn = list(tokens), []
        likeliest = DRAFT[: len(tokens)].argmax(-1).tolist()
        self.proposed = self.chooser.propose(self.backend, likeliest, PLACE)
        return self.drawn

    def decide(self, numbers: Sequence[float], say: Sequence[int] = ()) -> tuple[list[int], list[Scores]]:
        self.numbers, self.say, self.drawn = [*numbers, 0.0, 0.0, 0.0], list(say), []
        rows = len(self.proposed) + 1
        return self.chooser.decide(self.backend, rows, self.proposed, PLACE), self.drawn

    def by_rejection(self, before: list[int]) -> Scores:
        """The distribution of the token behind some that were accepted: all proposals and all numbers, added up."""
        found = np.zeros(V)
        for token in range(V):
            chance = self.propose([*before, token])[-1][token]
            if chance > 0:
                numbers = [0.0] * len(before)
                kept = _largest(lambda n: len(self.decide([*numbers, n])[0]) > len(numbers) + 1)  # noqa: B023
                found[token] += chance * kept
                if kept < 1 - 1e-9:
                    _, drawn = self.decide([*numbers, 1 - 1e-12])
                    found += chance * (1 - kept) * drawn[0]
        return found


def _largest(holds: Callable[[float], bool]) -> float:
    """Up to which number in [0, 1) something holds."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return high


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_rejection_sampling_is_exact(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    one = Noiseless(monkeypatch, options, "sampled")
    np.testing.assert_allclose(one.by_rejection([]), expected(options, PROMPT, [], TARGET[0]), atol=1e-8)
    first = int(expected(options, PROMPT, [], TARGET[0]).argmax())
    np.testing.assert_allclose(one.propose([first, 0])[1], expected(options, PROMPT, [first], DRAFT[1]), atol=1e-8)
    np.testing.assert_allclose(one.by_rejection([first]), expected(options, PROMPT, [first], TARGET[1]), atol=1e-8)
    second = int(expected(options, PROMPT, [first], TARGET[1]).argmax())
    one.propose([first, second])
    chosen, drawn = one.decide([0.0, 0.0])
    assert chosen[:2] == [first, second], "a number of 0 keeps what the target may say"
    np.testing.assert_allclose(drawn[-1], expected(options, PROMPT, [first, second], TARGET[2]), atol=1e-8)


@pytest.mark.parametrize("backend", [FewTokens(), Selector()], ids=["few tokens", "selector"])
@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_rejection_sampling_is_exact_for_other_drafters(
    options: dict[str, Any], backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Noiseless(monkeypatch, options, "sampled", backend=backend)
    target = expected(options, PROMPT, [], TARGET[0])
    (drafted,) = one.propose([int(IDS[0])])
    if isinstance(backend, Selector):  # its own distribution: of its candidates, at the temperature, and no filter
        scores = EDGES[0, 0] / options.get("temperature", 1.0)
        np.testing.assert_allclose(drafted[CANDIDATES[0]], np.exp(scores) / np.exp(scores).sum(), atol=1e-6)
    assert np.flatnonzero(drafted).tolist() != np.flatnonzero(target).tolist()
    np.testing.assert_allclose(one.by_rejection([]), target, atol=1e-8)
    first = int((drafted * target).argmax())
    np.testing.assert_allclose(one.by_rejection([first]), expected(options, PROMPT, [first], TARGET[1]), atol=1e-8)


@pytest.mark.parametrize("kind", ["argmax", "coupled"])
@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_tokens_compared_are_the_targets_own(options: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
                                             ) -> None:
    one = Noiseless(monkeypatch, options, kind)
    one.propose([3, 4])
    assert kind == "coupled" or one.proposed == DRAFT.argmax(-1).tolist()
    _, drawn = one.decide([], say=[*one.proposed, 0])
    for i, weights in enumerate(drawn):
        np.testing.assert_allclose(weights, expected(options, PROMPT, one.proposed[:i], TARGET[i]), atol=1e-8)
    assert len(drawn) == 3


def _counts(kind: str, options: dict[str, Any], count: int, make: type[TokenChooser] = TokenChooser,
            backend: Any = None) -> list[Any]:  # fmt: skip
    """How often each token was committed as first, second and third of a block."""
    one = make(GenerationConfig(**{"temperature": 1.0, "seed": 5, "proposals": kind, **options}), PROMPT, V)
    found, likeliest, backend = np.zeros((3, V), int), DRAFT.argmax(-1).tolist(), backend or Backend()
    for n in range(count):
        proposed = one.propose(backend, likeliest, 3 * n)
        for i, token in enumerate(one.decide(backend, 3, proposed, 3 * n)):
            found[i, token] += 1
    return list(found)


SAMPLES = 40_000


def test_a_distortion_of_two_percent_would_show() -> None:
    """The least visible one, with every token off by the same share: nearly all of 200 samples are beyond the limit."""
    true = expected({}, PROMPT, [], TARGET[0])
    half = np.argsort(true)[::2]
    sign = np.where(np.isin(np.arange(V), half), 1.0, -true[half].sum() / (1 - true[half].sum()))
    bent = true * (1 + sign * 0.02 / true[half].sum())
    assert np.abs(bent - true).sum() / 2 == pytest.approx(0.02)
    random = np.random.default_rng(0)
    assert sum(surprise(random.multinomial(SAMPLES, bent), SAMPLES * true) > LIMIT for _ in range(200)) > 180
    assert not any(surprise(random.multinomial(SAMPLES, true), SAMPLES * true) > LIMIT for _ in range(200))


COMBINED: dict[str, Any] = {"top_k": 4, "top_p": 0.95}


def _worst(counts: list[Any], options: dict[str, Any]) -> float:
    """The largest surprise of the three places; without penalties, as the text before a place varies."""
    return max(surprise(row, row.sum() * expected(options, PROMPT, [], scores))
               for row, scores in zip(counts, TARGET, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_samples_follow_the_target(kind: str) -> None:
    counts = _counts(kind, COMBINED, 4000)
    assert _worst(counts, COMBINED) < LIMIT
    shares = [row.sum() / 4000 for row in counts]
    assert shares[0] == 1 and 0.1 < shares[1] < 0.9, "some are accepted and some are not"


@pytest.mark.parametrize("backend", [FewTokens(), Selector()], ids=["few tokens", "selector"])
def test_samples_of_other_drafters_follow_the_target_and_a_bias_shows(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("coupled", "sampled"):
        counts = _counts(kind, {}, 4000, backend=backend)
        assert _worst(counts, {}) < LIMIT
        assert 0.1 < counts[1].sum() / 4000 < 0.9, "some are accepted and some are not"
    assert _worst(_counts("sampled", {}, 3000, WrongRow, backend), {}) > 2 * LIMIT
    monkeypatch.setattr(sampling, "_left", not_renormalised)
    assert _worst(_counts("sampled", {}, 3000, backend=backend), {}) > 2 * LIMIT


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), list(itertools.product(KINDS, [{}, *FILTERS[1:6]])), ids=str)
def test_enough_samples_follow_the_target(kind: str, options: dict[str, Any]) -> None:
    assert _worst(_counts(kind, options, SAMPLES), options) < LIMIT


@pytest.mark.parametrize("make", [SoftmaxForArgmax, WrongRow, OneSided, None])
def test_each_known_bias_is_caught(make: type[TokenChooser] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if make is None:
        monkeypatch.setattr(sampling, "_left", not_renormalised)
    assert _worst(_counts("sampled", COMBINED, 3000, make or TokenChooser), COMBINED) > 2 * LIMIT

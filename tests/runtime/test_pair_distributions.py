"""Texts of a tiny pair have the target's distribution, for every kind of proposals and every filter.

What target and drafter say to a text is computed once; the runtime's own loop and chooser then draw tens of thousands
of texts. Tokens are sorted by the row of the block that decided about them, the one behind all proposals included. For
each row it is known what every single token should have been drawn from, so that the counts can be judged whatever was
accepted before.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import pytest
from planted_biases import OneSided, SoftmaxForArgmax, WrongRow, not_renormalised
from slow_distribution import FILTERS, LIMIT, Scores, expected, surprise
from tiny_bundle import Sizes, write_bundle

from dflash_runtime import GenerationConfig, Session, sampling
from dflash_runtime.decode import decode
from dflash_runtime.sampling import TokenChooser

V = 7
PROMPT = [3, 1, 4, 1, 5]
NEW_TOKENS, BLOCK = 5, 3
KINDS = ["argmax", "coupled", "sampled"]
MANY = 13_500
"""Texts; of the first row of blocks that is more than 40,000 tokens, enough to see them off by 2 %."""


class RememberingBackend:
    """Says what a session's backend says, and computes it once for each text."""

    name, prefill_chunk_tokens = "remembering", 64

    def __init__(self, session: Session) -> None:
        self._backend = session._backend
        self._text: list[int] = []
        self.scores = functools.cache(self._scores)
        self._draft_rows = functools.cache(self._drafted)
        self._said: Any = None

    def reset(self, kept_rows: int = 0) -> int:
        return 0

    def prefill(self, ids: Sequence[int], position: int) -> int:
        return self.verify(ids, position)[-1]

    def verify(self, block: Sequence[int], position: int) -> list[int]:
        self._text = [*self._text[:position], *block]
        rows = range(position + 1, len(self._text) + 1)
        self._said = np.array([self.scores(tuple(self._text[:length])) for length in rows])
        return [0] * len(block)

    def draft(self, anchor: int, block_size: int, position: int) -> list[int]:
        self._text = [*self._text[:position], anchor]
        self._proposed = self._draft_rows(tuple(self._text), block_size)
        return [int(token) for token in self._proposed.argmax(-1)]

    def outputs(self, kind: Literal["target", "drafter"], rows: int) -> dict[str, Any]:
        return {"logits": self._said[-rows:]} if kind == "target" else {"draft_logits": self._proposed[:rows]}

    def append_context(self, rows: int, position: int) -> None:
        pass

    def close(self) -> None:
        pass

    def _scores(self, text: tuple[int, ...]) -> Any:
        self._backend.reset()
        self._backend.prefill(text, 0)
        return self._backend.outputs("target", 1)["logits"][0].copy()

    def _drafted(self, text: tuple[int, ...], block_size: int) -> Any:
        self._backend.reset()
        self._backend.prefill(text[:-1], 0)
        self._backend.append_context(len(text) - 1, 0)
        self._backend.draft(text[-1], block_size, len(text) - 1)
        return self._backend.outputs("drafter", block_size - 1)["draft_logits"].copy()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RememberingBackend]:
    sizes = Sizes(vocab=V, mask_token=6, stop_token_ids=(), seed=2)
    with Session.open(write_bundle(tmp_path_factory.mktemp("few") / "b", sizes), threads=1) as session:
        yield RememberingBackend(session)


class Counted:
    """Tokens of many texts, by the row of the block that decided about them."""

    def __init__(self) -> None:
        self.found = np.zeros((BLOCK, V))
        self.usual = np.zeros((BLOCK, V))
        self.covariance = np.zeros((BLOCK, V, V))

    def add(self, row: int, token: int, chances: Scores) -> None:
        self.found[row, token] += 1
        self.usual[row] += chances
        self.covariance[row] += np.diag(chances) - np.outer(chances, chances)

    def worst(self) -> float:
        """The largest surprise of the rows."""
        return max(map(surprise, self.found, self.usual, self.covariance))


def drawn(pair: RememberingBackend, kind: str, options: dict[str, Any], texts: int,
          make: type[TokenChooser] = TokenChooser) -> Counted:  # fmt: skip
    """Draws texts; every seed is another one."""
    counted = Counted()
    chances = functools.cache(lambda answer: expected(options, PROMPT, answer, pair.scores((*PROMPT, *answer))))
    for seed in range(texts):
        chooser = make(GenerationConfig(**{"temperature": 1.0, "seed": seed, "proposals": kind, **options}), PROMPT, V)
        answer: tuple[int, ...] = ()
        rounds = decode(pair, PROMPT, max_new_tokens=NEW_TOKENS, max_context_tokens=90, stop_token_ids=(),
                        block_size_of=lambda n: BLOCK, chooser=chooser)  # fmt: skip
        for done in rounds:
            for row, token in enumerate(done.committed):
                counted.add(row, token, chances(answer))
                answer = (*answer, token)
    return counted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, FILTERS[-1]], ids=["plain", "all filters"])
def test_texts_have_the_targets_distribution(pair: RememberingBackend, kind: str, options: dict[str, Any]) -> None:
    counted = drawn(pair, kind, options, 400)
    assert counted.worst() < LIMIT
    rows = counted.found.sum(-1)
    assert 0.05 < rows[1] / rows[0] < 0.9 and rows[2] > 5, "some proposals are accepted and some are not"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), list(itertools.product(KINDS, FILTERS)), ids=str)
def test_many_texts_have_the_targets_distribution(pair: RememberingBackend, kind: str, options: dict[str, Any]) -> None:
    counted = drawn(pair, kind, options, MANY)
    assert counted.found[0].sum() > 40_000
    assert counted.worst() < LIMIT


@pytest.mark.parametrize("make", [SoftmaxForArgmax, WrongRow, OneSided, None])
def test_each_known_bias_is_caught(
    pair: RememberingBackend, make: type[TokenChooser] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if make is None:
        monkeypatch.setattr(sampling, "_left", not_renormalised)
    assert drawn(pair, "sampled", {"top_k": 4, "top_p": 0.95}, 1000, make or TokenChooser).worst() > 2 * LIMIT

"""Sampled text is that of plain decoding with the same seed, whatever is proposed and however blocks are cut."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_bundle import write_bundle

from dflash_runtime import GenerationConfig, PromptError, Session, cycles
from dflash_runtime.cycles import accept
from dflash_runtime.sampling import TokenChooser

PROMPT = [5, 17, 3, 60, 42, 8]
PROCESSORS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 12, "top_p": 0.9},
    {"temperature": 0.3, "min_p": 0.02, "repetition_penalty": 1.3},
    {"temperature": 0.5, "presence_penalty": 0.8, "frequency_penalty": 0.3, "logit_bias": {7: 2.0, 60: -4.0}},
    {"repetition_penalty": 1.4},
    {"presence_penalty": 1.5},
    {"logit_bias": {9: 1.0}, "frequency_penalty": 0.7},
]


@pytest.fixture(scope="module")
def shared(tiny: Path) -> Iterator[Session]:
    with Session.open(tiny, threads=1) as opened:
        yield opened


def ask(session: Session, prompt: list[int] = PROMPT, **options: Any) -> Any:
    return session.generate(prompt, GenerationConfig(**{"max_new_tokens": 40, "stop_token_ids": (), **options}))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("options", PROCESSORS, ids="+".join)
def test_it_is_plain_decoding_with_that_seed(shared: Session, options: dict[str, Any], seed: int) -> None:
    plain = ask(shared, plain=True, seed=seed, **options)
    schedule = random.Random(seed)
    for how in ({"block_size": 8}, {"block_size": 3}, {"block_schedule": lambda n: schedule.choice([1, 2, 4, 8])}):
        drafted = ask(shared, seed=seed, **options, **how)
        assert drafted.token_ids == plain.token_ids and drafted.text == plain.text
        assert sum(drafted.acceptance_lengths) <= 39
    assert plain.seed == seed == plain.to_json()["seed"]


def test_some_proposals_are_accepted_and_some_are_not(shared: Session) -> None:
    lengths = Counter(n for s in range(6) for n in ask(shared, temperature=0.4, seed=s).acceptance_lengths)
    assert lengths[1] and any(n > 1 for n in lengths)


def test_a_fault_in_acceptance_shows(shared: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes one token more than was compared: it was drawn behind a proposal that is wrong."""

    def one_too_many(proposed: list[int], posterior: list[int]) -> list[int]:
        return list(posterior[: len(accept(proposed, posterior)) + 1])

    expected = [ask(shared, plain=True, temperature=0.5, seed=s).token_ids for s in range(3)]
    monkeypatch.setattr(cycles, "accept", one_too_many)
    assert [ask(shared, temperature=0.5, seed=s).token_ids for s in range(3)] != expected


def test_noise_of_the_wrong_place_shows(shared: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    true = TokenChooser.choose
    expected = ask(shared, plain=True, temperature=0.5, seed=1).token_ids
    monkeypatch.setattr(TokenChooser, "choose", lambda self, rows, drafts, place: true(self, rows, drafts, place // 2))
    assert ask(shared, temperature=0.5, seed=1).token_ids != expected


def test_seeds_differ_and_repeat(shared: Session) -> None:
    texts = {tuple(ask(shared, temperature=1.0, seed=s).token_ids) for s in range(5)}
    assert len(texts) == 5
    drawn = ask(shared, temperature=1.0)
    assert drawn.seed is not None
    assert ask(shared, temperature=1.0, seed=drawn.seed).token_ids == drawn.token_ids


def test_cold_or_narrow_is_greedy(shared: Session) -> None:
    greedy = ask(shared)
    assert greedy.seed is None and "seed" not in greedy.to_json()
    for options in ({"temperature": 1.0, "top_k": 1}, {"temperature": 0.0, "top_k": 5, "top_p": 0.3}):
        assert ask(shared, seed=2, **options).token_ids == greedy.token_ids


def test_tokens_follow_the_targets_distribution(tmp_path: Path) -> None:
    """The first token; every later one is chosen the same way, and drafted text is the plain one."""
    with Session.open(write_bundle(tmp_path / "free"), threads=1) as session:  # any token may win
        _compare_first_tokens(session, count=1200)


def _compare_first_tokens(session: Session, count: int) -> None:
    backend = session._backend
    backend.reset()
    backend.prefill(PROMPT, 0)
    scores = backend.logits(1)[0].astype(np.float64) / 0.5
    expected = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
    drawn = [ask(session, temperature=0.5, seed=s, max_new_tokens=1).token_ids[0] for s in range(count)]
    found = np.bincount(drawn, minlength=len(expected))
    common = expected * count > 5
    rest = count * expected[~common].sum()
    chi = (np.square(found[common] - count * expected[common]) / (count * expected[common])).sum()
    chi += (found[~common].sum() - rest) ** 2 / rest
    assert common.sum() > 20
    assert chi < common.sum() + 5 * np.sqrt(2 * common.sum())


def test_options_that_make_no_sense(shared: Session) -> None:
    for options, words in (({"temperature": -1.0}, "temperature"), ({"logit_bias": {999: 1.0}}, "logit_bias")):
        with pytest.raises(PromptError, match=words):
            ask(shared, **options)


def test_a_request_may_bring_its_own_chooser(shared: Session) -> None:
    made: list[TokenChooser] = []

    class Odd(TokenChooser):
        """Rules out even tokens."""

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.committed: list[int] = []
            made.append(self)

        def choose(self, logits: Any, proposed: Any, position: int) -> list[int]:
            ruled = logits.copy()
            ruled[:, ::2] = -1e30
            return super().choose(ruled, proposed, position)

        def commit(self, tokens: Any) -> None:
            super().commit(tokens)
            self.committed += tokens

    for options in ({}, {"temperature": 0.8, "seed": 4}):
        plain, drafted = (ask(shared, chooser=Odd, plain=plain, **options) for plain in (True, False))
        assert drafted.token_ids == plain.token_ids == made[-1].committed
        assert all(token % 2 for token in plain.token_ids)

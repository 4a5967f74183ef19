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

from dflash_runtime import GenerationConfig, PromptError, Session
from dflash_runtime.decode import accept
from dflash_runtime.ort_cpu import OrtCpuBackend
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


ANY: dict[str, list[Any]] = {
    "temperature": [0.0, 0.2, 0.7, 1.3], "top_k": [0, 1, 3, 40], "top_p": [1.0, 0.3, 0.95], "min_p": [0.0, 0.1],
    "repetition_penalty": [1.0, 0.8, 1.5], "presence_penalty": [0.0, -0.5, 1.2], "frequency_penalty": [0.0, 0.4],
    "logit_bias": [{}, {98: 3.0, 99: -2.0}], "proposals": ["argmax", "coupled"],
}  # fmt: skip


@pytest.mark.parametrize("seed", range(24))
def test_whatever_is_asked_for_it_is_plain_decoding(shared: Session, seed: int) -> None:
    """Processors, seeds, prompts, stops and schedules at random; `auto` follows the clock."""
    rng = random.Random(seed)
    options = {name: rng.choice(values) for name, values in ANY.items()}
    options |= {"seed": rng.getrandbits(64), "stop_token_ids": rng.choice([(), (98, 101), None])}
    prompt = [rng.randrange(256) for _ in range(rng.randrange(1, 40))]
    plain = ask(shared, prompt, plain=True, **options)
    sizes = [rng.choice([1, 1, 2, 3, 5, 8]) for _ in range(40)]
    for how in ({"block_schedule": lambda n: sizes[n]}, {"block_size": "auto"}):
        drafted = ask(shared, prompt, **options, **how)
        assert (drafted.token_ids, drafted.text) == (plain.token_ids, plain.text), options


@pytest.mark.parametrize("options", PROCESSORS[2:], ids="+".join)
def test_the_graphs_own_choice_is_not_used_where_others_are_active(
    shared: Session, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ask(shared, plain=True, seed=3, **options)
    true = OrtCpuBackend._run_target
    monkeypatch.setattr(OrtCpuBackend, "_run_target", lambda *asked: [7 for _ in true(*asked)])
    for how in ({}, {"plain": True}):
        assert ask(shared, seed=3, **options, **how).token_ids == plain.token_ids
    assert set(ask(shared).token_ids) == {7}, "greedy decoding takes it"


@pytest.mark.parametrize("options", PROCESSORS[:4], ids="+".join)
def test_so_it_is_with_coupled_proposals(shared: Session, options: dict[str, Any]) -> None:
    plain = ask(shared, plain=True, seed=5, **options)
    likeliest, drawn = (ask(shared, seed=5, proposals=kind, **options) for kind in ("argmax", "coupled"))
    assert likeliest.token_ids == drawn.token_ids == plain.token_ids
    assert likeliest.proposed_ids != drawn.proposed_ids


def test_rejection_sampling_repeats_by_seed_and_is_another_text(shared: Session) -> None:
    one, two, other = (ask(shared, temperature=0.7, proposals="sampled", seed=s, block_size=4) for s in (3, 3, 4))
    assert one.token_ids == two.token_ids and one.proposed_ids == two.proposed_ids
    assert len({tuple(r.token_ids) for r in (one, other, ask(shared, temperature=0.7, plain=True, seed=3))}) == 3
    assert any(n > 1 for n in one.acceptance_lengths) and 1 in one.acceptance_lengths


def test_drawn_proposals_need_no_temperature(shared: Session) -> None:
    """At temperature 0 they are the likeliest ones."""
    assert ask(shared, proposals="sampled").proposed_ids == ask(shared).proposed_ids


@pytest.mark.parametrize("kind", ["sampled", "coupled"])
def test_drafters_scores_that_are_not_finite_propose_nothing(
    shared: Session, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = OrtCpuBackend.outputs

    def broken(backend: OrtCpuBackend, kind: str, rows: int) -> dict[str, Any]:
        found = {name: array.copy() for name, array in true(backend, kind, rows).items()}
        if kind == "drafter":
            found["draft_logits"][1:, 5] = np.nan
        return found

    monkeypatch.setattr(OrtCpuBackend, "outputs", broken)
    found = ask(shared, temperature=0.7, seed=1, proposals=kind, block_size=4)
    assert {len(proposed) for proposed in found.proposed_ids} == {1}
    if kind == "coupled":
        assert found.token_ids == ask(shared, temperature=0.7, seed=1, plain=True).token_ids


NARROW: dict[str, Any] = {"temperature": 1.5, "top_k": 4, "stop_token_ids": (), "max_new_tokens": 3}


def _joint(session: Session, prompt: list[int], count: int) -> dict[tuple[int, ...], float]:
    """The probability of every text of so many tokens, by plain passes over the target alone."""
    if count == 0:
        return {(): 1.0}
    session._backend.reset()
    session._backend.prefill(prompt, 0)
    scores = session._backend.outputs("target", 1)["logits"][0].astype(np.float64) / NARROW["temperature"]
    kept = scores >= np.sort(scores)[-4]
    chances = np.where(kept, np.exp(scores - scores.max()), 0)
    chances /= chances.sum()
    return {(int(token), *rest): float(chances[token]) * chance for token in np.flatnonzero(kept)
            for rest, chance in _joint(session, [*prompt, int(token)], count - 1).items()}  # fmt: skip


def _pair_surprise(session: Session, kind: str, runs: int) -> tuple[float, float]:
    """Chi-square of whole texts, as deviations of its own from what is usual; and proposals accepted a round."""
    expected = _joint(session, PROMPT, 3)
    assert len(expected) == 64 and sum(expected.values()) == pytest.approx(1)
    results = [ask(session, seed=s, proposals=kind, block_size=3, **NARROW) for s in range(runs)]
    found = Counter(tuple(result.token_ids) for result in results)
    assert set(found) <= set(expected)
    cells = [(found[text], runs * chance) for text, chance in expected.items() if runs * chance > 4]
    rest = [(runs - sum(n for n, _ in cells), runs - sum(usual for _, usual in cells))]
    chi = sum((n - usual) ** 2 / usual for n, usual in [*cells, *rest])
    accepted = np.mean([n - 1 for result in results for n in result.acceptance_lengths])
    return (chi - len(cells)) / np.sqrt(2 * len(cells)), float(accepted)


@pytest.mark.parametrize("kind", ["argmax", "coupled", "sampled"])
def test_texts_of_a_pair_have_the_targets_distribution(shared: Session, kind: str) -> None:
    surprise, accepted = _pair_surprise(shared, kind, 700)
    assert surprise < 6 and 0.05 < accepted < 1.5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["argmax", "coupled", "sampled"])
def test_many_texts_of_a_pair_have_the_targets_distribution(shared: Session, kind: str) -> None:
    assert _pair_surprise(shared, kind, 12_000)[0] < 6


def test_a_bias_shows_in_the_texts_of_a_pair(shared: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Likeliest tokens, judged as if they had been drawn."""
    true = TokenChooser.propose
    monkeypatch.setattr(TokenChooser, "propose",
                        lambda self, backend, likeliest, place: true(self, backend, likeliest, place) and likeliest)
    assert _pair_surprise(shared, "sampled", 700)[0] > 12


def test_some_proposals_are_accepted_and_some_are_not(shared: Session) -> None:
    lengths = Counter(n for s in range(6) for n in ask(shared, temperature=0.4, seed=s).acceptance_lengths)
    assert lengths[1] and any(n > 1 for n in lengths)


def test_a_fault_in_acceptance_shows(shared: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the first proposal that is not the token drawn."""

    def one_too_many(proposed: list[int], posterior: list[int]) -> list[int]:
        right = accept(proposed, posterior)
        return [*right[:-1], proposed[len(right) - 1]] if len(right) <= len(proposed) else right

    expected = [ask(shared, plain=True, temperature=0.5, seed=s).token_ids for s in range(3)]
    monkeypatch.setattr("dflash_runtime.decode.accept", one_too_many)
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
    scores = backend.outputs("target", 1)["logits"][0].astype(np.float64) / 0.5
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

"""Choosing tokens: the order of processors, exact distributions, noise by place, nothing from broken rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_runtime import Bundle, GenerationConfig, PromptError
from dflash_runtime.sampling import TokenChooser

VOCAB = 24
LOGITS = np.random.default_rng(5).normal(size=(1, VOCAB)).astype(np.float32) * 2


def chooser(prompt: tuple[int, ...] = (1, 2), **options: Any) -> TokenChooser:
    return TokenChooser(GenerationConfig(**options), prompt, VOCAB)


def frequencies(count: int, logits: np.ndarray = LOGITS, **options: Any) -> np.ndarray:
    one = chooser(seed=7, **options)
    drawn = [one.choose(logits, [], n)[0] for n in range(count)]
    return np.bincount(drawn, minlength=VOCAB) / count


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - x.max())
    return e / e.sum()


def chi_square(found: np.ndarray, expected: np.ndarray, count: int) -> float:
    some = expected > 0
    assert not found[~some].any()
    return float((count * (found[some] - expected[some]) ** 2 / expected[some]).sum())


def test_the_distribution_is_the_targets() -> None:
    count = 8000
    # 24 words have 23 degrees of freedom: beyond 60 by chance once in a hundred thousand times.
    assert chi_square(frequencies(count, temperature=1.0), softmax(LOGITS[0]), count) < 60
    assert chi_square(frequencies(count, temperature=0.5), softmax(LOGITS[0] / 0.5), count) < 60


def test_a_biased_draw_shows() -> None:
    count, expected = 12_000, softmax(LOGITS[0])
    assert chi_square(frequencies(count, temperature=1.2), expected, count) > 60


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 8, "top_p": 0.8, "min_p": 0.05},
        {"repetition_penalty": 1.7}, {"repetition_penalty": 0.6, "top_k": 4, "temperature": 0.7},
        {"logit_bias": {3: 4.0, 9: -50.0}, "top_p": 0.9}, {"temperature": 2.5, "top_p": 0.5},
    ],
)  # fmt: skip
def test_filters_and_their_order_are_those_of_transformers(options: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    from transformers import GenerationConfig as TheirConfig
    from transformers.generation.logits_process import LogitsProcessorList, SequenceBiasLogitsProcessor
    from transformers.generation.utils import GenerationMixin

    prompt, options = (1, 2, 7, 7, 11), {"temperature": 1.0, **options}
    theirs = {name: value for name, value in options.items() if name != "logit_bias"}
    config = TheirConfig(do_sample=True, **{"top_k": 0, "top_p": 1.0, **theirs})
    processors = LogitsProcessorList()
    if "logit_bias" in options:
        processors.append(SequenceBiasLogitsProcessor({(t,): float(b) for t, b in options["logit_bias"].items()}))
    holder = type("Holder", (GenerationMixin,), {"config": type("C", (), {"is_encoder_decoder": False})()})()
    processors += holder._get_logits_processor(generation_config=config, input_ids_seq_length=len(prompt), device="cpu")
    scores = processors(torch.tensor([prompt]), torch.from_numpy(LOGITS.copy()))
    expected = torch.softmax(scores.double(), -1)[0].numpy()
    one = TokenChooser(GenerationConfig(seed=11, **options), prompt, VOCAB)
    count = 4000
    drawn = np.bincount([one.choose(LOGITS, [], n)[0] for n in range(count)], minlength=VOCAB) / count
    assert chi_square(drawn, expected, count) < 60
    assert set(np.flatnonzero(expected > 5e-3)) <= set(np.flatnonzero(drawn))


def test_the_token_of_a_place_depends_on_seed_and_place_alone() -> None:
    rows = np.repeat(LOGITS, 6, 0)
    one, two = chooser(temperature=1.0, seed=3), chooser(temperature=1.0, seed=3)
    alone = [two.choose(rows[i : i + 1], [], 40 + i)[0] for i in (0, 1, 2, 3, 4, 5)]
    together = one.choose(rows, alone[:5], 40)
    assert together == alone
    wrong = [*alone[:2], alone[2] + 1, *alone[3:5]]
    assert one.choose(rows, wrong, 40) == alone[:3], "what is behind a wrong proposal is not chosen"
    assert together != [chooser(temperature=1.0, seed=4).choose(rows[:1], [], 40 + i)[0] for i in range(6)]
    assert len(set(together)) > 1


def test_places_and_seeds_share_no_noise() -> None:
    """Of equal scores the noise alone decides; a shifted copy would walk through the vocabulary in equal steps."""
    flat, places = np.zeros((1, 4096), np.float32), range(40)
    for seed in (0, 1, 2**63):
        one = TokenChooser(GenerationConfig(temperature=1.0, seed=seed), (1,), 4096)
        drawn = [one.choose(flat, [], place)[0] for place in places]
        steps = np.diff(drawn) % 4096
        assert len(set(steps.tolist())) > len(steps) - 3 and len(set(drawn)) > 35
    two = TokenChooser(GenerationConfig(temperature=1.0, seed=1), (1,), 4096)
    other = TokenChooser(GenerationConfig(temperature=1.0, seed=0), (1,), 4096)
    assert sum(two.choose(flat, [], p) == other.choose(flat, [], p + d) for p in places for d in (-1, 0, 1) if p) < 3


def test_penalties_see_the_proposals_before_a_row() -> None:
    rows = np.zeros((3, VOCAB), np.float32)
    rows[:, 5], rows[:, 6], rows[:, 7] = 3.0, 2.5, 2.2
    one = chooser(presence_penalty=1.0)
    assert one.choose(rows, [5, 6], 10) == [5, 6, 7]
    assert one.choose(rows, [5, 6], 10) == [5, 6, 7], "what was proposed is not committed"
    one.commit([5])
    assert one.choose(rows[:1], [], 11) == [6]
    often = chooser(frequency_penalty=0.4)
    often.commit([5, 5])
    assert often.choose(rows[:1], [], 12) == [6]
    assert chooser(prompt=(5,), presence_penalty=9.0).choose(rows[:1], [], 1) == [5], "the prompt is no answer"
    assert chooser(prompt=(5,), repetition_penalty=9.0).choose(rows[:1], [], 1) == [6]


def test_extreme_filters_are_greedy() -> None:
    best = int(LOGITS[0].argmax())
    for options in ({"temperature": 0.0}, {"temperature": 1.0, "top_k": 1}, {"temperature": 1.0, "top_p": 1e-9},
                    {"temperature": 1.0, "min_p": 1.0}, {"temperature": 1e-4}):  # fmt: skip
        assert {chooser(seed=s, **options).choose(LOGITS, [], 9)[0] for s in range(20)} == {best}


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_choose_nothing(broken: float, temperature: float) -> None:
    rows = np.repeat(LOGITS, 2, 0)
    rows[1, 4] = broken
    right = chooser(temperature=temperature, seed=1).choose(rows[:1], [], 7)
    assert chooser(temperature=temperature, seed=1).choose(rows, right, 7) == [*right, -1]


def test_the_graphs_argmax_is_enough_for_greedy_decoding_alone() -> None:
    assert not GenerationConfig().needs_logits and not GenerationConfig(top_k=3, top_p=0.5).needs_logits
    for options in ({"temperature": 0.1}, {"repetition_penalty": 1.1}, {"presence_penalty": 0.1},
                    {"frequency_penalty": -1.0}, {"logit_bias": {1: 2.0}}, {"min_p": 0.1}):  # fmt: skip
        assert GenerationConfig(**options).needs_logits  # type: ignore[arg-type]
        assert GenerationConfig(**options).needs_full_rows == ("temperature" not in options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"), ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0"), ({"top_p": 1.5}, "top_p"), ({"min_p": 2.0}, "min_p"),
        ({"top_k": -1}, "top_k is -1"), ({"top_k": 1.5}, "top_k"), ({"seed": -3}, "seed"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"), ({"logit_bias": {999_999: 1.0}}, "999999"),
        ({"logit_bias": {3: float("inf")}}, "3: inf"), ({"proposals": "greedy"}, "argmax, coupled, sampled"),
    ],
)  # fmt: skip
def test_options_that_make_no_sense(tiny: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(PromptError, match=named):
        GenerationConfig(**options).check(Bundle.open(tiny).manifest)

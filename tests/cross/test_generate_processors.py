"""Processors of scores and their order are those of Transformers' `generate`: every combination, on its own texts."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Make
from pairs import MAIN
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from dflash_runtime import GenerationConfig, Session, sampling
from dflash_runtime.sampling import TokenChooser

PROMPT = [5, 17, 3, 60, 42, 8, 17]
VOCAB = 512
FILTERS: dict[str, Any] = {"temperature": 0.6, "top_k": 9, "top_p": 0.8, "min_p": 0.12}
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.5, "logit_bias": {3: 4.0, 9: 1.5, 60: -3.0},
                             "presence_penalty": 0.9, "frequency_penalty": 0.6}  # fmt: skip


def combinations(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All choices of some of them, none included."""
    for kept in itertools.product([False, True], repeat=len(options)):
        yield {name: value for (name, value), one in zip(options.items(), kept, strict=True) if one}


class OpenAiPenalties(LogitsProcessor):
    """Presence and frequency of what was answered, as a processor of the user's own: Transformers has none."""

    def __init__(self, presence: float, frequency: float) -> None:
        self.presence, self.frequency = presence, frequency

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        counts = torch.bincount(input_ids[0, len(PROMPT) :], minlength=scores.shape[-1])
        return scores - self.frequency * counts - self.presence * (counts > 0)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def bundle(exported: Make) -> Path:
    return exported(MAIN)


@pytest.fixture(scope="module")
def model(bundle: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(bundle.parent / "target", dtype=torch.float32).eval()


def generate(model: Any, options: dict[str, Any], new_tokens: int) -> Any:
    """What Transformers says, with the scores before and after its processors."""
    theirs = dict(options)
    bias = {(token,): value for token, value in theirs.pop("logit_bias", {}).items()}
    own = OpenAiPenalties(theirs.pop("presence_penalty", 0.0), theirs.pop("frequency_penalty", 0.0))
    sampled = bool(FILTERS.keys() & options.keys()) or options.get("temperature") == 1.0
    defaults = {"top_k": 0, "top_p": 1.0, "temperature": 1.0} if sampled else {}
    with torch.no_grad():
        return model.generate(
            torch.tensor([PROMPT]), do_sample=sampled, max_new_tokens=new_tokens, eos_token_id=None, pad_token_id=0,
            sequence_bias=bias or None, logits_processor=LogitsProcessorList([own]), **{**defaults, **theirs},
            output_scores=True, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip


def largest_difference(said: Any, options: dict[str, Any]) -> float:
    """Between the probabilities of `generate` and those our chooser draws from, over the places of its text."""
    chooser, worst = TokenChooser(GenerationConfig(seed=0, **options), PROMPT, VOCAB), 0.0
    for row, scores, token in zip(said.logits, said.scores, said.sequences[0, len(PROMPT) :].tolist(), strict=True):
        kept = chooser._kept(row[0].numpy())
        assert kept is not None
        found = np.zeros(VOCAB)
        found[kept[0]] = np.exp(kept[1]) / np.exp(kept[1]).sum()
        if "temperature" in options:
            expected = torch.softmax(scores[0].double(), -1).numpy()
        else:
            expected = np.eye(VOCAB)[int(scores[0].argmax())]
        worst = max(worst, float(np.abs(found - expected).max()))
        chooser.commit([token])
    return worst


@pytest.mark.parametrize("penalties", list(combinations(PENALTIES)), ids=lambda options: "+".join(options) or "none")
def test_sampled_places_have_the_probabilities_of_generate(model: Any, penalties: dict[str, Any]) -> None:
    torch.manual_seed(1)
    for filters in combinations(FILTERS):
        options = {"temperature": 1.0, **filters, **penalties}
        assert largest_difference(generate(model, options, 3), options) < 1e-5, options


def test_another_order_would_show(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**FILTERS, **PENALTIES}
    true = sampling._least

    def swapped(scores: Any, one: GenerationConfig, total: float | None = None) -> float:
        nucleus = true(scores, GenerationConfig(top_p=one.top_p))
        return max(nucleus, true(scores[scores >= nucleus], GenerationConfig(top_k=one.top_k, min_p=one.min_p)))

    said = generate(model, options, 4)
    assert largest_difference(said, options) < 1e-5
    monkeypatch.setattr(sampling, "_least", swapped)
    assert largest_difference(said, options) > 1e-3


@pytest.fixture(scope="module")
def session(bundle: Path) -> Iterator[Session]:
    with Session.open(bundle, threads=1) as opened:
        yield opened


@pytest.mark.parametrize("penalties", list(combinations(PENALTIES)), ids=lambda options: "+".join(options) or "none")
def test_greedy_texts_are_those_of_generate(model: Any, session: Session, penalties: dict[str, Any]) -> None:
    expected = generate(model, penalties, 16).sequences[0, len(PROMPT) :].tolist()
    ask = functools.partial(GenerationConfig, max_new_tokens=16, stop_token_ids=(), **penalties)
    for how in ({"plain": True}, {"block_size": 8}):
        assert session.generate(PROMPT, ask(**how)).token_ids == expected



"""A target's answers: those of Transformers, whole after a kill, and usable for training."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_calls import invoke_here
from tiny_models import write_target
from transformers import AutoModelForCausalLM

from dflash_runtime.errors import OutputError, PromptError
from dflash_tools.answer_batch import AnswerBatch, AnswerRules
from dflash_tools.answer_linear import can_pack, pack_linear_layers
from dflash_tools.data_making import DataOptions, make_data
from dflash_tools.prompt_file import read_prompts
from dflash_tools.training_answers import ANSWERS_FILE
from dflash_tools.training_taps import TAPS_FILE

STOPS = set(range(0, 512, 9))
WINDOW = {"sliding_window": 8}
KINDS: dict[str, dict[str, Any]] = {"qwen3": {}, "llama": {}, "mistral": WINDOW, "gemma2": WINDOW}


def random_prompts(count: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(256) for _ in range(rng.randrange(1, 20))] for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_is_that_of_transformers(kind: str, tmp_path: Path) -> None:
    write_target(tmp_path, kind, **KINDS[kind])
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    prompts, expected = random_prompts(11), []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, eos_token_id=list(STOPS),
            pad_token_id=0,
        )  # fmt: skip
        expected.append(found[0, len(prompt) :].tolist())
    finished: list[int] = []
    assert can_pack(model)
    pack_linear_layers(model, 4)
    batch = AnswerBatch(model, 4, 44, AnswerRules(24, STOPS))
    assert batch.answer(prompts, [0] * 11, finished.append) == expected
    assert sorted(finished) == sorted(map(len, expected))
    assert len(set(finished)) > 1  # rows ended at different times, so others took their places


def test_sampled_answers_depend_on_their_own_seed_alone(tmp_path: Path) -> None:
    write_target(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    prompts = random_prompts(6)
    rules = AnswerRules(12, STOPS, temperature=2.0)
    together = AnswerBatch(model, 3, 40, rules).answer(prompts, list(range(6)), lambda n: None)
    alone = [AnswerBatch(model, 1, 40, rules).answer([p], [i], lambda n: None)[0] for i, p in enumerate(prompts)]
    assert together == alone
    assert together != AnswerBatch(model, 3, 40, rules).answer(prompts, list(range(1, 7)), lambda n: None)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "target"
    write_target(folder, num_hidden_layers=6)
    return folder


@pytest.fixture
def options(target: Path, tmp_path: Path) -> DataOptions:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"question": "q" * (i % 7 + 1) + str(i)}) + "\n" for i in range(40)))
    return DataOptions(
        str(target), prompts, tmp_path / "data", field="question", max_new_tokens=10, batch_size=1, template_args={}
    )


class Killed(BaseException):
    """Nothing after it runs."""


def test_a_killed_run_ends_with_the_same_bytes(
    options: DataOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = (lambda *a: None, lambda text: None)
    make_data(options, *quiet)
    whole = (options.out / ANSWERS_FILE).read_bytes()
    assert len(whole.splitlines()) == 40
    again = dataclasses.replace(options, out=tmp_path / "again")

    def dies(stage: str, done: int, total: int) -> None:
        if done == 25:
            raise Killed

    with pytest.raises(Killed):
        make_data(again, dies, quiet[1])
    path = again.out / ANSWERS_FILE
    assert len(path.read_bytes().splitlines()) == 16  # one round of 16 prompts a row; the second was broken off
    with path.open("ab") as stream:
        stream.write(b'{"number": 3, "prom')
    result = make_data(again, *quiet)
    assert result["num_resumed"] == 16
    assert path.read_bytes() == whole
    assert (again.out / TAPS_FILE).read_bytes() == (options.out / TAPS_FILE).read_bytes()
    assert make_data(again, *quiet)["num_resumed"] == 40


def test_other_options_do_not_go_on_with_old_answers(options: DataOptions, target: Path) -> None:
    quiet = (lambda *a: None, lambda text: None)
    make_data(dataclasses.replace(options, no_taps=True), *quiet)
    with pytest.raises(OutputError, match="max_new_tokens was 10 and is 11"):
        make_data(dataclasses.replace(options, max_new_tokens=11), *quiet)
    with pytest.raises(OutputError, match="something else"):
        make_data(dataclasses.replace(options, out=target), *quiet)


def test_the_command_writes_what_the_training_reads(options: DataOptions, target: Path, tmp_path: Path) -> None:
    made = invoke_here(
        "make-data", "--target", target, "--prompts", options.prompt_file, "--out", options.out, "--field", "question",
        "--max-new-tokens", 10, "--template-arg", "polite=true", "--json",
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    assert "taps take at most" in made.stderr
    assert json.loads(made.stdout)["num_answers"] + json.loads(made.stdout)["num_left_out"] == 40
    trained = invoke_here(
        "train-drafter", "--target", target, "--data", options.out, "--out", tmp_path / "drafter", "--layers", 1,
        "--block-size", 4, "--steps", 2, "--held-out", 4, "--json",
    )  # fmt: skip
    assert trained.exit_code == 0, trained.output
    assert json.loads(trained.stdout)["complete"] is True
    assert trained.stderr == ""  # a pipe gets no progress
    assert not list((tmp_path / "drafter").rglob(TAPS_FILE))  # those of make-data were used
    card = (tmp_path / "drafter" / "README.md").read_text(encoding="utf-8")
    assert "tokens a round" in card
    assert "greedy, at most 10 tokens; prompts through the chat template with polite=true" in card
    assert str(tmp_path) not in card.partition("## Made by")[0]


def test_a_long_prompt_and_a_missing_field_are_refused(options: DataOptions) -> None:
    with pytest.raises(PromptError, match="reads 512 in all"):
        make_data(dataclasses.replace(options, max_new_tokens=505), lambda *a: None, lambda text: None)
    with pytest.raises(PromptError, match="--field"):
        read_prompts(options.prompt_file, "prompt")


def test_taps_that_cannot_fit_are_refused_before_any_answer(
    options: DataOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_tools.data_making.ITEM_BYTES", 1 << 50)
    with pytest.raises(OutputError, match="--no-taps"):
        make_data(options, lambda *a: None, lambda text: None)
    assert not options.out.exists()


def test_prompts_in_every_spelling(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "b"}]
    rows = ["a", messages, {"prompt": "c"}, {"messages": messages}]
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    assert read_prompts(tmp_path / "p.jsonl", "prompt") == ["a", messages, "c", messages]
    (tmp_path / "p.txt").write_text("one\n\ntwo\n", encoding="utf-8")
    assert read_prompts(tmp_path / "p.txt", "prompt") == ["one", "two"]
    for text, word in (("", "holds no prompts"), ("{", "p.jsonl:1 is no JSON")):
        (tmp_path / "p.jsonl").write_text(text, encoding="utf-8")
        with pytest.raises(PromptError, match=word):
            read_prompts(tmp_path / "p.jsonl", "prompt")

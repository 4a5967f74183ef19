"""A training on disk: killed and resumed, refused, and left alone where it must be."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from training_files import few_steps, write_random_answers, write_training_files

import dflash_tools.training_run
from dflash_export.checkpoint import find_checkpoint
from dflash_runtime.errors import CheckpointError, DFlashError, OutputError, PairError
from dflash_tools.training_answers import read_answers
from dflash_tools.training_checkpoint import STATE_FILE, load_state
from dflash_tools.training_taps import TAPS_FILE, CachedTaps, TapFileFacts, cache_taps


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training")
    write_training_files(folder)
    return folder


@pytest.fixture(scope="module")
def whole(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted training."""
    out = tmp_path_factory.mktemp("whole") / "drafter"
    assert few_steps(files, out).complete
    return out


class Killed(BaseException):
    """What a kill looks like from inside: nothing after it runs."""


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


def test_a_run_killed_between_saves_ends_bit_for_bit_the_same(
    files: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "drafter"
    real, saves = dflash_tools.training_run.save_state, [0]

    def dies_after_the_fifth(folder: Path, state: Any) -> None:
        real(folder, state)
        saves[0] += 1
        if saves[0] == 5:
            raise Killed

    monkeypatch.setattr(dflash_tools.training_run, "save_state", dies_after_the_fifth)
    with pytest.raises(Killed):
        few_steps(files, out, save_every_s=0.0)
    assert not (out / "model.safetensors").exists()
    monkeypatch.undo()
    result = few_steps(files, out, resume=True)
    assert result.complete
    assert result.step == 8
    assert weights(out).keys() == weights(whole).keys()
    assert all(torch.equal(tensor, weights(whole)[name]) for name, tensor in weights(out).items())
    assert [entry["step"] for entry in result.history] == [3, 6, 8]
    assert result.history == few_steps(files, whole, resume=True).history


def test_the_processes_order_and_anchors_matter_to_that(files: Path, whole: Path, tmp_path: Path) -> None:
    # Another seed gives other weights, so the equality above is no accident of a training that does nothing.
    few_steps(files, tmp_path / "drafter", seed=1)
    other = weights(tmp_path / "drafter")
    assert not any(torch.equal(tensor, weights(whole)[name]) for name, tensor in other.items())


@pytest.mark.parametrize("option", [{"draw_slots": True}, {"other_tokens": 20}])
def test_drawn_slots_and_tokens_train_otherwise_and_as_repeatably(
    files: Path, whole: Path, tmp_path: Path, option: dict[str, Any]
) -> None:
    first, second = (few_steps(files, tmp_path / name, **option) for name in ("first", "second"))
    assert first.history == second.history
    assert all(torch.equal(t, weights(tmp_path / "first")[n]) for n, t in weights(tmp_path / "second").items())
    assert not any(torch.equal(t, weights(whole)[n]) for n, t in weights(tmp_path / "first").items())


def test_a_killed_process_leaves_a_state_that_can_be_read(files: Path, tmp_path: Path) -> None:
    out = tmp_path / "drafter"
    arguments = [
        "train-drafter", "--target", files / "target", "--data", files / "answers.jsonl", "--out", out, "--layers", "2",
        "--block-size", "4", "--steps", "100000", "--batch-size", "1", "--held-out", "0", "--save-every", "0",
        "--anchors", "2", "--precision", "fp32",
    ]  # fmt: skip
    argv = [sys.executable, "-m", "dflash_tools.cli", *map(str, arguments)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(argv, env={**os.environ, "OMP_NUM_THREADS": "1"}, **quiet) as process:
        deadline = time.monotonic() + 100
        while not (out / "training" / STATE_FILE).is_file() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.02)
        time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
    saved = torch.load(out / "training" / STATE_FILE, weights_only=True)
    assert saved["step"] > 0
    assert load_state(out / "training", saved["settings"]) is not None


def test_a_stop_by_the_clock_can_be_resumed(files: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "drafter"
    first = few_steps(files, out, stop_after_s=0.0)
    assert (first.complete, first.step) == (False, 1)
    while not few_steps(files, out, resume=True, stop_after_s=0.0).complete:
        pass
    assert all(torch.equal(tensor, weights(whole)[name]) for name, tensor in weights(out).items())


def test_the_target_is_as_it_was(files: Path, whole: Path) -> None:
    stored = load_file(files / "target" / "model.safetensors")
    assert not {name for name in weights(whole) if "embed" in name or "lm_head" in name}
    again = files.parent / "again"
    write_training_files(again)
    fresh = load_file(again / "target" / "model.safetensors")
    assert all(torch.equal(tensor, stored[name]) for name, tensor in fresh.items())


@pytest.mark.parametrize(
    ("changes", "error", "word"),
    [
        ({}, OutputError, "--resume"),
        ({"resume": True, "seed": 4}, CheckpointError, "seed was 0 and is 4"),
        ({"resume": True, "layer_ids": (1, 2)}, CheckpointError, "config was"),
        ({"resume": True, "layer_ids": (1, 6)}, PairError, "has 6"),
        ({"resume": True, "num_held_out": 12}, CheckpointError, "held out"),
    ],
)
def test_what_does_not_fit_is_refused(
    files: Path, whole: Path, changes: dict[str, Any], error: type[DFlashError], word: str
) -> None:
    before = hashlib.sha256((whole / "model.safetensors").read_bytes()).hexdigest()
    with pytest.raises(error, match=word):
        few_steps(files, whole, **changes)
    assert hashlib.sha256((whole / "model.safetensors").read_bytes()).hexdigest() == before


def test_resuming_nothing_and_a_damaged_state_are_refused(files: Path, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no training"):
        few_steps(files, tmp_path / "none", resume=True)
    broken = tmp_path / "broken"
    (broken / "training").mkdir(parents=True)
    data = (whole / "training" / STATE_FILE).read_bytes()
    (broken / "training" / STATE_FILE).write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="cannot be read"):
        few_steps(files, broken, resume=True)


def test_the_checkpoint_is_found_as_a_drafter(whole: Path) -> None:
    found = find_checkpoint(str(whole), role="drafter")
    assert "fc.weight" in found.places
    card = (whole / "config.json").read_text(encoding="utf-8")
    assert '"target_layer_ids"' in card


def test_cached_taps_go_on_after_a_kill_and_are_those_of_one_run(files: Path, tmp_path: Path) -> None:
    answers = read_answers(files / "answers.jsonl", vocab_size=512, max_text_tokens=100, num_held_out=0)
    facts = TapFileFacts(answers.sha256, "target", (0, 1), 4)
    asked: list[int] = []

    def taps(ids: Any) -> torch.Tensor:
        asked.append(len(ids))
        if len(asked) == 5:
            raise Killed
        return torch.tensor(ids)[:, None].float() + torch.arange(4)

    with pytest.raises(Killed):
        cache_taps(tmp_path, answers, facts, taps, lambda *a: None)
    with (tmp_path / TAPS_FILE).open("ab") as stream:
        stream.write(b"12345")  # half a row
    cache_taps(tmp_path, answers, facts, taps, lambda *a: None)
    assert len(asked) == len(answers.texts) + 1  # only the text that was broken off is done twice
    cached = CachedTaps(tmp_path, answers, 4)
    for i, text in enumerate(answers.texts):
        ids = torch.tensor(text.token_ids[:-1])
        assert torch.equal(cached.of(i).float(), ids[:, None].float() + torch.arange(4))
    cache_taps(tmp_path, answers, dataclasses.replace(facts, layer_ids=(0, 2)), taps, lambda *a: None)
    assert len(asked) == 2 * len(answers.texts) + 1  # other taps: all anew


def test_taps_that_do_not_fit_the_disk_are_refused_before_the_work(files: Path, tmp_path: Path) -> None:
    answers = read_answers(files / "answers.jsonl", vocab_size=512, max_text_tokens=100, num_held_out=0)
    facts = TapFileFacts(answers.sha256, "target", (0,), 1 << 50)
    with pytest.raises(OutputError, match="GB free"):
        cache_taps(tmp_path, answers, facts, lambda ids: pytest.fail("the target was run"), lambda *a: None)


def test_a_prompt_is_never_on_both_sides(tmp_path: Path) -> None:
    prompts = [[i % 5, 7] for i in range(30)]
    write_random_answers(tmp_path / "a.jsonl", 30, prompts=prompts)
    answers = read_answers(tmp_path / "a.jsonl", vocab_size=512, max_text_tokens=100, num_held_out=13)
    held = {answers.texts[i].prompt_ids for i in answers.held_out}
    assert len(answers.held_out) == 12  # two prompts of six texts each
    assert held.isdisjoint({answers.texts[i].prompt_ids for i in answers.trained})


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("no json", "a.jsonl:1 is no JSON"),
        ("[1]", "no JSON object"),
        ('{"prompt_ids": [1]}', "answer_ids must be a list"),
        ('{"prompt_ids": [1], "answer_ids": [1, 512]}', "token 512 and the target has 512"),
        ('{"prompt_ids": [1], "answer_ids": [1]}', "0 usable texts"),
    ],
)
def test_lines_that_are_no_answers_are_refused(tmp_path: Path, line: str, word: str) -> None:
    (tmp_path / "a.jsonl").write_text(line + "\n", encoding="utf-8")
    with pytest.raises(CheckpointError, match=word):
        read_answers(tmp_path / "a.jsonl", vocab_size=512, max_text_tokens=100, num_held_out=1)

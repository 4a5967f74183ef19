"""Acceptance on sets of prompts: the prompts, the rule for loops, the means, and a difference that must show."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tiny_models import favour_few_tokens, write_drafter, write_target

from dflash_engines.ort_cpu import lower_bundle
from dflash_export.build import export_bundle
from dflash_export.build_plan import BuildOptions, plan_build
from dflash_runtime.errors import PromptError
from dflash_tools.acceptance_prompts import set_prompts
from dflash_tools.acceptance_sets import Measured, main, summary
from dflash_tools.authors_loop import AuthorsLoop
from dflash_tools.looping_answers import loops

GSM8K = [{"question": f"How much is {i} and {i}?", "answer": "#"} for i in range(5)]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`target`, `drafter` and their `bundle` in one folder."""
    folder = tmp_path_factory.mktemp("pair")
    config = write_target(folder / "target")
    favour_few_tokens(folder / "target", 3)
    write_drafter(folder / "drafter", config)
    (folder / "bundle").mkdir()
    plan = plan_build(BuildOptions(str(folder / "target"), str(folder / "drafter")))
    export_bundle(plan, folder / "bundle", lambda *a: None)
    lower_bundle(folder / "bundle")
    return folder


def run(pair: Path, *arguments: str) -> Any:
    fixed = [
        str(pair / "bundle"),
        "--model",
        str(pair / "target"),
        "--drafter",
        str(pair / "drafter"),
        "--threads",
        "1",
    ]
    return CliRunner().invoke(main, [*fixed, *arguments])


def test_ours_and_the_authors_rounds_are_equal(pair: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", GSM8K)
    wanted = ["--set", f"gsm8k={path}", "--num-prompts", "3", "--max-new-tokens", "70", "--json"]
    found = json.loads(run(pair, *wanted).stdout)
    assert found["equal"] is True
    assert [row["row"] for row in found["prompts"]] == [0, 1, 2]
    assert all(row["acceptance_lengths"] == row["authors_lengths"] for row in found["prompts"])
    means = found["sets"]["gsm8k"]["all"]
    assert means["ours"] == means["authors"]
    assert means["ours"]["over_rounds"] > 1
    assert means["answers"] == 3
    shown = run(pair, *wanted[:-1])
    assert shown.exit_code == 0
    assert "equal to the authors' package" in shown.stdout


def test_another_drafter_in_the_authors_hands_shows(pair: Path, tmp_path: Path) -> None:
    other = shutil.copytree(pair / "drafter", tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["fc.weight"] = -tensors["fc.weight"]
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    path = write_rows(tmp_path / "rows.jsonl", GSM8K)
    result = run(
        pair, "--set", f"gsm8k={path}", "--max-new-tokens", "60", "--num-prompts", "5", "--drafter", str(other)
    )
    assert result.exit_code == 1
    assert "prompts differ, first row" in result.stderr
    assert "DIFFERENT" in result.stdout


def test_a_loop_of_the_authors_that_says_other_tokens_shows(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = AuthorsLoop.answer

    def one_token_less(self: AuthorsLoop, *arguments: Any) -> Any:
        found = real(self, *arguments)
        return found._replace(token_ids=found.token_ids[:-1])

    monkeypatch.setattr(AuthorsLoop, "answer", one_token_less)
    path = write_rows(tmp_path / "rows.jsonl", GSM8K)
    result = run(pair, "--set", f"gsm8k={path}", "--num-prompts", "1", "--max-new-tokens", "20")
    assert result.exit_code == 1
    assert "same tokens: False" in result.stderr


def test_without_the_authors_nothing_is_claimed_of_them(pair: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", GSM8K)
    arguments = ["--set", f"gsm8k={path}", "--num-prompts", "1", "--max-new-tokens", "20", "--without-authors"]
    found = json.loads(run(pair, *arguments, "--json").stdout)
    assert found["equal"] is None
    assert found["sets"]["gsm8k"]["all"]["authors"] is None
    assert "authors' package" not in run(pair, *arguments).stdout


@pytest.mark.parametrize("period", [1, 2, 13, 32])
def test_a_periodic_tail_is_a_loop(period: int) -> None:
    rng = random.Random(period)
    unit = rng.sample(range(1000), period)
    start = rng.sample(range(1000), 20)
    assert loops(start + unit * 64)
    assert loops((start + unit * 64)[: 20 + 64])
    assert not loops((start + unit * 64)[: 20 + 40])  # too short to tell
    broken = start + unit * 64
    broken[-5] = 1001
    assert not loops(broken)


def test_longer_periods_and_plain_answers_are_no_loops() -> None:
    rng = random.Random(0)
    assert not loops(rng.sample(range(1000), 33) * 8)
    assert not loops([rng.randrange(1000) for _ in range(200)])
    assert not loops([])


def measured(lengths: list[int], *, looping: bool, authors: list[int] | None = None) -> Measured:
    return Measured("gsm8k", 0, sum(lengths) + 1, "length", looping, lengths, authors, True, 4.0, 2.0)


def test_means_with_and_without_loops() -> None:
    rows = [measured([1, 1, 4], looping=False), measured([8, 8], looping=True), measured([3], looping=False)]
    found = summary(rows, block_size=8, num_prompts=3, max_new_tokens=20)["sets"]["gsm8k"]
    assert found["num_looping"] == 1
    assert found["all"]["ours"] == {"over_rounds": pytest.approx(25 / 6), "over_requests": pytest.approx(13 / 3)}
    assert found["without_looping"]["ours"] == {"over_rounds": 9 / 4, "over_requests": 2.5}
    assert found["all"]["speed_over_plain"] == 2.0
    only_loops = summary(rows[1:2], block_size=8, num_prompts=1, max_new_tokens=20)["sets"]["gsm8k"]
    assert only_loops["without_looping"] is None


def test_lengths_that_differ_are_not_equal() -> None:
    assert measured([1, 2], looping=False, authors=[1, 2]).equal
    assert not measured([1, 2], looping=False, authors=[2, 1]).equal


def test_prompts_are_the_first_ones_wrapped_as_the_authors_do(tmp_path: Path) -> None:
    authors = pytest.importorskip("dflash.benchmark").DATASETS
    rows = {
        "gsm8k": [{"question": "What is {x}?"}, {"question": "And 2?"}, {"question": "3?"}],
        "math500": [{"problem": "a{b}c"}],
        "humaneval": [{"prompt": 'def f():\n    """ {} """\n'}],
        "mt-bench": [{"turns": ["First {turn}.", "Second."]}],
    }
    for name, of_set in rows.items():
        found = set_prompts(name, write_rows(tmp_path / "rows.jsonl", of_set), min(2, len(of_set)))
        assert [prompt.row for prompt in found] == list(range(min(2, len(of_set))))
        if name == "mt-bench":
            assert found[0].text == "First {turn}."
        else:
            assert [prompt.text for prompt in found] == [authors[name]["format"](row) for row in of_set[:2]]


@pytest.mark.parametrize(
    ("content", "word"),
    [("", "0 prompts, 1 were asked"), ('{"other": 1}\n', "no text in 'question'"), ("x\n", "cannot be read as JSONL")],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: str, word: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(PromptError, match=word):
        set_prompts("gsm8k", path, 1)

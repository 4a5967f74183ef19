"""Prompts to train on: worded as the measured ones, and never one of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dflash_runtime.errors import PromptError
from dflash_tools.docstring_prompts import docstring_prompts, source_folders
from dflash_tools.training_prompts import main

SOURCE = '''
def add_all(numbers, start=0) -> int:
    """Return the sum of all numbers, counted from a start."""

def add_all_again(numbers):
    """Return the sum of all numbers, counted from a start."""

def __hidden__(numbers):
    """Return the sum of all numbers, counted from zero on."""

def short(x):
    """Too short."""

class Thing:
    def method(self, other: str = "a"):
        """Compares this thing with another thing by its name.

        >>> Thing().method("b")
        """
    def alone(self):
        """Says something about this thing without an argument."""
'''


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    (folder / "tests").mkdir(parents=True)
    (folder / "a.py").write_text(SOURCE, encoding="utf-8")
    (folder / "broken.py").write_text("def (", encoding="utf-8")
    (folder / "tests" / "b.py").write_text(SOURCE.replace("sum", "product"), encoding="utf-8")
    return folder


def test_functions_are_shown_by_signature_and_docstring_once(sources: Path) -> None:
    prompts = sorted(docstring_prompts([sources], 10, seed=0))
    assert len(prompts) == 2
    assert prompts[0] == (
        "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
        "def add_all(numbers, start=0) -> int:\n"
        '    """ Return the sum of all numbers, counted from a start.\n    """\n\n```'
    )
    assert "def method(other: str='a'):" in prompts[1]
    assert '>>> Thing().method("b")' in prompts[1]


def test_names_that_are_measured_on_are_left_out_and_the_seed_decides(sources: Path) -> None:
    assert all("add_all(" not in prompt for prompt in docstring_prompts([sources], 10, 0, without=["add_all"]))
    orders = {tuple(docstring_prompts([sources], 10, seed)) for seed in range(8)}
    assert len(orders) == 2
    assert docstring_prompts([sources], 1, 3) == docstring_prompts([sources], 2, 3)[:1]


def test_a_package_that_is_not_there_is_named() -> None:
    with pytest.raises(PromptError, match="no_such_package is no package"):
        source_folders(["no_such_package"])


def test_held_out_prompts_do_not_get_in(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", [{"question": f"{i}?"} for i in range(6)])
    test = write(tmp_path / "test.jsonl", [{"question": "4?"}, {"question": "9?"}])
    result = CliRunner().invoke(
        main, ["--out", str(tmp_path / "out.jsonl"), "--gsm8k", train, "--held-out", f"gsm8k={test}"]
    )
    assert json.loads(result.stdout) == {"out": str(tmp_path / "out.jsonl"), "gsm8k": 5, "code": 0, "held_out": 1}
    found = rows_of(tmp_path / "out.jsonl")
    assert {row["prompt"].partition("\n")[0] for row in found} == {f"{i}?" for i in (0, 1, 2, 3, 5)}
    assert all(row["prompt"].endswith("final answer within \\boxed{}.") for row in found)


def test_the_functions_of_held_out_code_do_not_get_in(
    tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_tools.training_prompts.source_folders", lambda packages: [sources])
    measured = write(tmp_path / "measured.jsonl", [{"prompt": "def add_all(xs):\n    pass\n"}])
    arguments = ["--out", str(tmp_path / "out.jsonl"), "--code", "5"]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    assert sum("add_all(" in row["prompt"] for row in rows_of(tmp_path / "out.jsonl")) == 1
    assert CliRunner().invoke(main, [*arguments, "--held-out", f"humaneval={measured}"]).exit_code == 0
    found = rows_of(tmp_path / "out.jsonl")
    assert found
    assert not any("add_all(" in row["prompt"] for row in found)


def test_nothing_to_write_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--out", str(tmp_path / "out.jsonl")])
    assert result.exit_code == 1
    assert "No prompts are left" in result.stderr

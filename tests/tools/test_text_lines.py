"""Characters that are line ends for Python alone stay inside a prompt, wherever prompts are read."""

from __future__ import annotations

import json
from pathlib import Path

from dflash_tools import human_eval_prompts
from dflash_tools.acceptance_prompts import all_prompts
from dflash_tools.bench_prompts import find_prompts
from dflash_tools.prompt_file import read_prompts
from dflash_tools.text_lines import json_lines, text_lines

ODD = "one\u2028two\u2029three\x85four\x0bfive\x0csix\x1cseven"


def _file(folder: Path, name: str, **row: object) -> Path:
    path = folder / name
    path.write_text(json.dumps(row, ensure_ascii=False) + "\r\n\n", encoding="utf-8", newline="")
    return path


def test_only_a_line_feed_ends_a_line() -> None:
    assert text_lines(f"{ODD}\r\nx\n") == [ODD, "x", ""]
    assert json_lines('{"a": "\u2028"}\n\n[1]\r\n') == [{"a": "\u2028"}, [1]]


def test_prompts_for_answers(tmp_path: Path) -> None:
    assert read_prompts(_file(tmp_path, "p.jsonl", prompt=ODD), "prompt") == [ODD]
    plain = tmp_path / "p.txt"
    plain.write_text(f"{ODD}\nsecond\n", encoding="utf-8")
    assert read_prompts(plain, "prompt") == [ODD, "second"]


def test_prompts_to_measure_on(tmp_path: Path) -> None:
    (prompt,) = all_prompts("gsm8k", _file(tmp_path, "g.jsonl", question=ODD))
    assert prompt.text.startswith(ODD)
    found = find_prompts(f"gsm8k={_file(tmp_path, 'b.jsonl', question=ODD)}", 1)
    (conversation,) = found.conversations
    assert str(conversation[0]).startswith(ODD)
    assert human_eval_prompts.human_eval_prompts(1, _file(tmp_path, "h.jsonl", prompt=ODD)) == [ODD]

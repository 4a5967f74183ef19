"""Lines of a file as JSONL means them: only a line feed ends one."""

from __future__ import annotations

import json
from typing import Any


def text_lines(text: str) -> list[str]:
    """Lines of a text without their ends, Windows ones too.

    `str.splitlines` also splits at characters that stand raw inside JSON strings, such as U+2028.
    """
    return [line.removesuffix("\r") for line in text.split("\n")]


def json_lines(text: str) -> list[Any]:
    """The values of a JSONL text; empty lines are skipped.

    Raises:
        ValueError: a line is no JSON.
    """
    return [json.loads(line) for line in text_lines(text) if line.strip()]

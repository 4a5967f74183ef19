"""A file of prompts: one a line, as plain text or as JSON."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from dflash_runtime.errors import PromptError
from dflash_tools.text_lines import text_lines

Messages = list[dict[str, Any]]
_FIELD = "prompt"


def read_prompts(path: Path, field: str | None = None) -> list[str | Messages]:
    """All prompts of a file in their order.

    A `.txt` file has a prompt on every line. A `.jsonl` file has a string, a list of messages, or an object whose
    `field` (or `messages`) is one of those.

    Args:
        path: The file.
        field: Key of an object that holds the prompt, as a command's `--field` says; None for `prompt` in one without.

    Raises:
        PromptError: no such file, no prompts, or a line that holds none.
    """
    try:
        lines = text_lines(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{path} cannot be read as a file of prompts ({error}).") from error
    plain = path.suffix == ".txt"
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    prompts = [line if plain else _prompt(line, field, f"{path}:{number}") for number, line in numbered]
    if not prompts:
        raise PromptError(f"{path} holds no prompts.")
    return prompts


def _prompt(line: str, field: str | None, where: str) -> str | Messages:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise PromptError(f"{where} is no JSON ({error}). Plain text, line by line, goes into a .txt file.") from error
    found, key = row, field or _FIELD
    if isinstance(row, dict):
        found = row.get(key, row.get("messages"))
    if isinstance(found, str) and found:
        return found
    if isinstance(found, list) and found and all(isinstance(m, dict) and "role" in m for m in found):
        return found
    keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
    remedy = f"Call the key {key!r} or 'messages'." if field is None else "Name the key with --field."
    raise PromptError(f"{where} has no prompt in {key!r} (it has: {keys}). {remedy}")


def prompts_sha256(prompts: list[str | Messages]) -> str:
    """Of the prompts as they are used."""
    return hashlib.sha256(json.dumps(prompts, ensure_ascii=False).encode()).hexdigest()

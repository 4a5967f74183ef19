"""The messages of a conversation, and the file they are kept in: a JSON list of objects with role and content."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from dflash_runtime.bundle import write_atomically
from dflash_runtime.errors import OutputError, PromptError

Message = dict[str, str]


def system_prompt(messages: Sequence[Message]) -> str | None:
    """What the conversation begins with, where that is a system prompt."""
    return messages[0]["content"] if messages and messages[0]["role"] == "system" else None


def with_system_prompt(messages: Sequence[Message], text: str | None) -> list[Message]:
    """The conversation under another system prompt, or under none."""
    rest = list(messages[1:] if system_prompt(messages) is not None else messages)
    return rest if text is None else [{"role": "system", "content": text}, *rest]


def read_conversation(path: Path) -> list[Message]:
    """The messages of a file.

    Raises:
        PromptError: it cannot be read, or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = (isinstance(error, OSError) and error.strerror) or error
        raise PromptError(f"{path} cannot be read as a conversation ({why}). Name one that /save wrote.") from error
    if not isinstance(found, list):
        raise PromptError(f"{path} holds a {type(found).__name__} and no list of messages. Name one that /save wrote.")
    for i, message in enumerate(found):
        fields = [message.get(key) for key in ("role", "content")] if isinstance(message, dict) else []
        if len(fields) != 2 or not all(isinstance(field, str) for field in fields):
            wanted = '{"role": "user", "content": "..."}'
            raise PromptError(f"Message {i} of {path} is {message!r} and must be like {wanted}.")
    return found


def write_conversation(path: Path, messages: Sequence[Message]) -> None:
    """Writes a file, or replaces one that holds a conversation; the old one stays where that fails.

    Raises:
        OutputError: the file holds something else, or cannot be written.
    """
    if path.exists():
        try:
            read_conversation(path)
        except PromptError as error:
            raise OutputError(f"{path} exists and holds no conversation, so it stays. Choose another name.") from error
    try:
        write_atomically(path, json.dumps(list(messages), ensure_ascii=False, indent=1) + "\n")
    except OSError as error:
        raise OutputError(f"{path} cannot be written ({error.strerror}). Choose another place.") from error

"""Messages of a chat request to messages for a chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_tools.serve_errors import ApiError, unsupported, wrong_field

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""OpenAI's role -> the template's: `developer` is OpenAI's newer word for what templates call `system`."""
_KEPT = ("name", "tool_calls", "tool_call_id")
_NO_ACTION = ("refusal", "audio", "annotations", "function_call")
"""Of an assistant's earlier message; they are null in what this server answers."""


def read_messages(value: Any) -> list[dict[str, Any]]:
    """Roles and texts, a list of text parts joined; ApiError for the first message that cannot be used."""
    if not isinstance(value, list) or not value:
        raise wrong_field("messages", value, "a list of at least one message")
    return [_message(f"messages[{i}]", message) for i, message in enumerate(value)]


def _message(place: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise wrong_field(place, message, 'an object like {"role": "user", "content": "..."}')
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong_field(f"{place}.role", role, "one of " + ", ".join(_ROLES))
    found = {"role": _ROLES[role], "content": _content(place, message)}
    for name, part in message.items():
        if name in _KEPT and part:
            found[name] = part
        elif part and name in _NO_ACTION:
            raise unsupported(f"{place}.{name}", "this server acts upon text only. Leave it out.")
        elif part and name not in ("role", "content", *_KEPT):
            raise ApiError(400, f"{place} has the unknown field {name}.", param=f"{place}.{name}",
                           code="unknown_parameter")  # fmt: skip
    return found


def _content(place: str, message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message.get("role") == "assistant" and message.get("tool_calls"):
        return ""
    if not isinstance(content, list) or not content:
        raise wrong_field(f"{place}.content", content, "a text or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            where = f"{place}.content[{i}]"
            if isinstance(kind, str) and kind != "text":
                raise unsupported(where, f"it is of type {kind!r}, and this server's models read text only.")
            raise wrong_field(where, part, 'like {"type": "text", "text": "..."}')
        texts.append(part["text"])
    return "".join(texts)

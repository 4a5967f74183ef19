"""Reads the fields of a request's JSON, each with its type and range; what nobody has read is unknown."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_tools.serve_errors import ApiError, unsupported, wrong_field


def parse_body(body: bytes) -> dict[str, Any]:
    """The JSON object in a body; ApiError where it is none."""
    try:
        found = json.loads(body, parse_constant=_no_constant)
        if b"\\ud" in body.lower():
            json.dumps(found, ensure_ascii=False).encode()  # half of a surrogate pair is no character
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(found, dict):
        raise ApiError(400, f"The body is a JSON {type(found).__name__}, not an object.", code="invalid_json")
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


class Fields:
    """The fields of one request; null counts as left out. Every method raises ApiError for a value out of range."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = {name: value for name, value in body.items() if value is not None}
        self._read: set[str] = set()

    def value(self, name: str) -> Any:
        """The value as it is, None where there is none."""
        self._read.add(name)
        return self._body.get(name)

    def text(self, name: str) -> str:
        """A text that must be there."""
        value = self.value(name)
        if not isinstance(value, str) or not value:
            raise wrong_field(name, value, "a text that is not empty")
        return value

    def flag(self, name: str) -> bool:
        """True or false; false where there is none."""
        value = self.value(name)
        if value is not None and not isinstance(value, bool):
            raise wrong_field(name, value, "true or false")
        return bool(value)

    def whole(self, name: str, low: int, high: int) -> int | None:
        """A whole number within limits, both included."""
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise wrong_field(name, value, f"a whole number from {low} to {high}")
        return value

    def choice(self, name: str, default: str, known: Sequence[str]) -> str:
        """One of some words."""
        value = self.value(name)
        if value is not None and value not in known:
            raise wrong_field(name, value, "one of " + ", ".join(known))
        return default if value is None else str(value)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """A number within limits, both included."""
        value = self.value(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            limit = f" to {high:g}" if math.isfinite(high) else " on"
            raise wrong_field(name, value, f"a number from {low:g}{limit}")
        return float(value)

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """A text or a list of some, none empty."""
        value = self.value(name)
        found = [value] if isinstance(value, str) else value or []
        if not isinstance(found, list) or len(found) > most or not all(isinstance(t, str) and t for t in found):
            raise wrong_field(name, value, f"a text or a list of at most {most} texts, none empty")
        return tuple(found)

    def mapping(self, name: str) -> dict[str, Any]:
        """An object; an empty one where there is none."""
        value = self.value(name)
        if value is not None and not isinstance(value, dict):
            raise wrong_field(name, value, "an object")
        return value or {}

    def finish(self, ignored: Sequence[str], neutral: Mapping[str, tuple[Sequence[Any], str]]) -> None:
        """Refuses what is left.

        Args:
            ignored: Fields that change nothing about an answer.
            neutral: Fields this server does not act upon, with the values that ask for nothing and why others do.
        """
        for name, value in self._body.items():
            if name in self._read or name in ignored:
                continue
            if name not in neutral:
                raise ApiError(400, f"Unrecognized request argument supplied: {name}", param=name,
                               code="unknown_parameter")  # fmt: skip
            values, why = neutral[name]
            if value not in values:
                raise unsupported(name, why)

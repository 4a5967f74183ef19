"""How values on the command line are read."""

from __future__ import annotations

import json
import re
from typing import Any

import click


def read_template_args(pairs: tuple[str, ...]) -> dict[str, Any]:
    """Chat template arguments from `KEY=VALUE`; a VALUE that is JSON (false, 3, null) is read as such.

    Raises:
        click.BadParameter: there is no `=`, or no name before it.
    """
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise click.BadParameter(f"{pair!r} is not of the form KEY=VALUE, such as enable_thinking=false.")
        try:
            values[name] = json.loads(text)
        except json.JSONDecodeError:
            values[name] = text
    return values


def read_token_ids(text: str) -> list[int]:
    """Token ids separated by commas or white space.

    Raises:
        click.BadParameter: something is not a whole number.
    """
    words = [word for word in re.split(r"[\s,\[\]]+", text) if word]
    for word in words:
        if not re.fullmatch(r"[+-]?\d+", word):
            raise click.BadParameter(f"{word!r} is not a token id; with --ids the prompt is numbers such as 1,2,3.")
    return [int(word) for word in words]

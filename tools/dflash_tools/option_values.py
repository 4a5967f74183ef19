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


def read_logit_bias(pairs: tuple[str, ...]) -> dict[int, float]:
    """Token ids and what is added to their scores, from `ID=BIAS`.

    Raises:
        click.BadParameter: one is not of that form.
    """
    found = {}
    for pair in pairs:
        try:
            token, bias = pair.split("=")
            found[int(token)] = float(bias)
        except ValueError:
            raise click.BadParameter(f"{pair!r} is not of the form ID=BIAS, such as 17=-5 or 17=-inf.") from None
    return found


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


class MemorySize(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.3
    """A number of bytes, with a unit if wanted: 1500000000, 800MB, 1.5GB, 2GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes of a text; click's usage error for anything that is not a positive size."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B?", str(value).strip())
        if found is None:
            self.fail(f"{value!r} is not a size in bytes such as 800MB, 1.5GB or 2GiB.", param, ctx)
        number, unit, binary = found.groups()
        size = float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " ")
        if size < 1:
            self.fail(f"{value!r} is no size.", param, ctx)
        return int(size)


class BlockSize(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.3
    """A whole number, or auto."""

    name = "block size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """The number, or `auto`; click's usage error for anything else. The session checks the range."""
        text = str(value).strip()
        if text == "auto" or re.fullmatch(r"[+-]?\d+", text):
            return text if text == "auto" else int(text)
        return self.fail(f"{value!r} is neither a whole number nor auto.", param, ctx)


BLOCK_SIZE = BlockSize()
MEMORY_SIZE = MemorySize()

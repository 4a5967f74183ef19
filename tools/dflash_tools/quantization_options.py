"""How weights are stored, as options of the commands that store them or count what they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

_KINDS = click.Choice(["keep", "int8", "int4", "fp8"])
_OPTIONS = (
    click.option("--quantize-head", type=_KINDS, default="keep", show_default=True,
                 help="Of the output head, and of the embedding where it is the same table."),
    click.option("--quantize-drafter", type=_KINDS, default="keep", show_default=True,
                 help="Of the drafter's own matrices."),
    click.option("--group-size", type=click.Choice(["32", "64", "128"]), default="32", show_default=True,
                 help="int4: inputs that share a scale."),
    click.option("--asymmetric", is_flag=True, help="int4: a zero point for each group."),
)  # fmt: skip


def quantization_options(command: Command) -> Command:
    """Adds what `--quantize` or `--precision` leaves to say."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command

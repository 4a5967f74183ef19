"""How tokens are chosen, as options of a command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from dflash_runtime.generation import PROPOSALS
from dflash_tools.option_values import read_logit_bias

Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the likeliest token."),
    click.option("--top-k", type=int, default=0, metavar="K", help="Choose among the K likeliest. [default: all]"),
    click.option("--top-p", type=float, default=1.0, help="Choose among the likeliest with this probability together."),
    click.option("--min-p", type=float, default=0.0, help="Leave out what is less likely than this times the best."),
    click.option("--repetition-penalty", type=float, default=1.0, help="Above 1: say less again, prompt included."),
    click.option("--presence-penalty", type=float, default=0.0, help="Taken from the score of what was answered."),
    click.option("--frequency-penalty", type=float, default=0.0, help="The same, for each time it was."),
    click.option("--logit-bias", multiple=True, metavar="ID=BIAS", callback=lambda _, __, given: read_logit_bias(given),
                 help="Added to the score of the token with this id; repeatable. -inf rules it out."),
    click.option("--proposals", type=click.Choice(PROPOSALS), default=PROPOSALS[0], show_default=True,
                 help="What the drafter proposes above temperature 0: its likeliest tokens; tokens drawn with the "
                 "target's noise; or drawn with noise of their own, for rejection sampling. All give the target's "
                 "distribution; with `sampled` the text of a seed depends on the block sizes too."),
    click.option("--seed", type=int, help="Equal seeds give equal texts. [default: a new one, told in --json]"),
)  # fmt: skip


def sampling_options(command: Command) -> Command:
    """Adds the options of `GenerationConfig` that say how tokens are chosen, under their names there."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command

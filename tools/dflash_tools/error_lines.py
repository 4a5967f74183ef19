"""A user's mistake is one line on stderr and exit code 1; a fault in this program keeps its traceback."""

from __future__ import annotations

import os
import sys
from typing import Any

import click
from dflash_runtime.errors import DFlashError

EXIT_REFUSED = 1
EXIT_INTERRUPTED = 130


class DFlashCommand(click.Command):
    """A click command whose `DFlashError` becomes one line."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command and turns expected endings into exit codes."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # a closed pipe shows here, where it is handled, and not at exit
        except DFlashError as error:
            click.echo(f"Error: {one_line(str(error))}", err=True)
            ctx.exit(EXIT_REFUSED)
        except KeyboardInterrupt:
            click.echo("", err=True)
            ctx.exit(EXIT_INTERRUPTED)
        except BrokenPipeError:
            # The reader left (`| head`): nothing to report. Python flushes stdout once more at exit; give it
            # a place to write to.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(0)
        return result


def one_line(text: str) -> str:
    """The text on one line; a terminal shows it whole either way."""
    return " ".join(text.split())

"""A user's mistake is one line on stderr and exit code 1; a fault in this program keeps its traceback."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
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
    """The text with every run of white space, line breaks included, as one space."""
    return " ".join(text.split())


@contextlib.contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Around heavy imports: a package that is not installed is named with the command that installs it.

    Args:
        extra: The extra of this distribution that brings the package.

    Raises:
        DFlashError: a third-party package is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if not name or name.startswith("dflash_"):
            raise  # a fault in this program, not in the installation
        raise DFlashError(
            f"This command needs the package {name}, which is not installed. "
            f"Install it with: pip install 'dflash-export[{extra}]'"
        ) from error

"""Two ways to call the command: in this process, and in one of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping

from click.testing import CliRunner, Result

from dflash_tools.cli import main

Completed = subprocess.CompletedProcess[str]
Invoke = Callable[..., Result]
Launch = Callable[..., Completed]


def invoke_here(*arguments: object, stdin: str | None = None) -> Result:
    """A bug's exception is raised, not kept."""
    return CliRunner().invoke(main, [str(a) for a in arguments], input=stdin, catch_exceptions=False)


def launch_apart(*arguments: object, stdin: str = "", env: Mapping[str, str] | None = None) -> Completed:
    """Streams are pipes."""
    argv = [sys.executable, "-m", "dflash_tools.cli", *(str(a) for a in arguments)]
    return subprocess.run(argv, input=stdin, capture_output=True, text=True, env=env, check=False, timeout=120)

"""The only place where `doctor` reads a machine: files, commands, packages, libraries. It changes nothing."""

from __future__ import annotations

import dataclasses
import glob
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dflash_tools import library_versions

COMMAND_TIME_LIMIT_S = 20
"""A driver that hangs must not hang the doctor."""


@dataclasses.dataclass(frozen=True)
class CommandResult:
    """How a command ended."""

    exit_code: int
    stdout: str
    stderr: str


class Machine:
    """Reads the machine this program runs on; tests put a recorded machine in its place."""

    def operating_system(self) -> str:
        """`Linux`, `Darwin`, `Windows`."""
        return platform.system()

    def architecture(self) -> str:
        """`x86_64`, `aarch64`."""
        return platform.machine()

    def python_version(self) -> str:
        """`3.11.7`."""
        return platform.python_version()

    def python_prefix(self) -> str:
        """Folder of this Python or of its virtual environment."""
        return sys.prefix

    def in_virtual_environment(self) -> bool:
        """Whether this Python is that of a virtual environment."""
        return sys.prefix != sys.base_prefix

    def working_folder(self) -> str:
        """Where a bundle would be written by default."""
        return str(Path.cwd())

    def read_text(self, path: str) -> str | None:
        """A file's text; None where there is no such file or it may not be read."""
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def find_files(self, pattern: str) -> list[str]:
        """Paths that match a pattern with `*`, sorted."""
        return sorted(glob.glob(pattern))  # noqa: PTH207 - absolute patterns, which Path.glob refuses

    def run(self, *command: str) -> CommandResult | None:
        """Runs a command that only reports; None where it is not installed.

        A command that does not start or exceeds the time limit ends with exit code -1 and says so in `stderr`.
        """
        if shutil.which(command[0]) is None:
            return None
        environment = {**os.environ, "LC_ALL": "C"}
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                timeout=COMMAND_TIME_LIMIT_S,
                env=environment,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            return CommandResult(-1, "", f"{command[0]} gave no answer within {COMMAND_TIME_LIMIT_S} s")
        except OSError as error:
            return CommandResult(-1, "", str(error))
        return CommandResult(done.returncode, done.stdout, done.stderr)

    def package_version(self, distribution: str) -> str | None:
        """Version of an installed distribution, without importing it."""
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    def module_folder(self, module: str) -> str | None:
        """Folder of a top-level module this Python can import, found without importing it."""
        spec = importlib.util.find_spec(module)
        if spec is None:
            return None
        folders = list(spec.submodule_search_locations or [])
        return folders[0] if folders else str(Path(spec.origin or "").parent)

    def libraries(self, names: Sequence[str]) -> dict[str, dict[str, str | int]]:
        """Per library what `library_versions` says: its version, or why it does not load.

        Empty on other systems than Linux.
        """
        if self.operating_system() != "Linux":
            return {}
        answers: dict[str, dict[str, str | int]] = {}
        for name in names:  # one process each: a library that crashes says nothing about the others
            done = self.run(sys.executable, "-I", library_versions.__file__, name)
            if done is None or done.exit_code != 0:
                words = "this Python was not found" if done is None else f"exit {done.exit_code}: {done.stderr[-200:]}"
                answers[name] = {"error": f"the process that loads it did not end well ({words})"}
                continue
            answers.update(json.loads(done.stdout))
        return answers

    def free_disk_bytes(self, folder: str) -> int:
        """Bytes this user may still write in a folder's file system."""
        return shutil.disk_usage(folder).free

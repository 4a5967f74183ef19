"""Where the engines of a bundle lie, and how a finished folder takes the place of the one before."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from dflash_runtime.bundle import Bundle
from dflash_runtime.device_engine import engine_folders
from dflash_runtime.errors import OutputError

_PARTIAL = ".partial-"
"""Followed by the process that builds there."""


def engines_folder(bundle: Bundle, tag: str) -> Path:
    """The folder for engines of a device, its parent made: in the bundle, or in the cache where that is read-only.

    Raises:
        OutputError: neither can be written.
    """
    problems = []
    for folder in engine_folders(bundle, tag):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problems.append(f"{folder.parent}: {error.strerror or error}")
            continue
        if os.access(folder.parent, os.W_OK):
            return folder
        problems.append(f"{folder.parent}: not writable")
    raise OutputError(f"The engines cannot be written ({'; '.join(problems)}). Make one of these folders writable.")


@contextlib.contextmanager
def partial_folder(parent: Path) -> Iterator[Path]:
    """A folder to build in, gone afterwards; what a build that was killed has left beside it goes too."""
    for left in parent.glob(f"{_PARTIAL}*"):
        owner = left.name.removeprefix(_PARTIAL)
        if not owner.isdigit() or not Path(f"/proc/{owner}").exists():
            shutil.rmtree(left, ignore_errors=True)
    folder = parent / f"{_PARTIAL}{os.getpid()}"
    try:
        (folder / "engines").mkdir(parents=True)
        yield folder / "engines"
    except OSError as error:
        raise OutputError(f"The engines cannot be written to {folder}: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def replace_folder(finished: Path, folder: Path) -> None:
    """Puts a finished folder in place; the one before stays usable until then.

    Raises:
        OutputError: the folder cannot be written; the one before is still there.
    """
    retired = folder.with_name(f".{folder.name}.{os.getpid()}.retired")
    try:
        if folder.exists():
            folder.rename(retired)
        finished.rename(folder)
    except OSError as error:
        raise OutputError(f"The engines cannot be put into {folder}: {error.strerror or error}.") from error
    finally:
        if retired.exists() and not folder.exists():
            retired.rename(folder)
        shutil.rmtree(retired, ignore_errors=True)

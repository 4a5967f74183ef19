"""Nothing half-written: a bundle grows in a hidden folder beside its place and is renamed when it is complete."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from dflash_runtime.bundle import MANIFEST_NAME
from dflash_runtime.errors import OutputError


def check_output_place(out: Path, needed_bytes: int) -> None:
    """Refuses an output place before any long work.

    Args:
        out: Where the bundle shall lie.
        needed_bytes: Estimate of what will be written.

    Raises:
        OutputError: something else is there, the parent is not writable, or there is too little room.
    """
    if out.exists() and not (out / MANIFEST_NAME).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise OutputError(f"{out} exists and is not a bundle. Choose another --out, or remove it.")
    parent = out.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise OutputError(f"{parent} is a file, so {out} cannot be made below it. Choose another --out.")
    if not os.access(parent, os.W_OK):
        raise OutputError(f"{parent} is not writable. Choose another --out.")
    free = shutil.disk_usage(parent).free
    if free < needed_bytes:
        raise OutputError(
            f"{out} needs {needed_bytes / 1e9:.2f} GB and {parent} has {free / 1e9:.2f} GB free. Make room or choose "
            "another --out."
        )


@contextlib.contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """Yields an empty folder beside `out`; on success it takes the place of `out`, on failure it vanishes.

    Raises:
        OutputError: the folder cannot be made or moved.
    """
    out = out.absolute()
    staging = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        staging.mkdir(parents=True)
    except OSError as error:
        raise OutputError(f"{staging.parent} cannot be written: {error.strerror or error}.") from error
    try:
        yield staging
        _take_place(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _take_place(staging: Path, out: Path) -> None:
    old = out.with_name(f".{out.name}.{os.getpid()}.old")
    try:
        if out.exists():
            out.rename(old)
        try:
            staging.rename(out)
        except OSError:
            if old.exists():
                old.rename(out)
            raise
    except OSError as error:
        raise OutputError(f"moving the finished bundle to {out} failed: {error.strerror or error}.") from error
    shutil.rmtree(old, ignore_errors=True)

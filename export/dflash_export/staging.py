"""Nothing half-written: a bundle grows in a hidden folder beside its place and is renamed when it is complete."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dflash_runtime.bundle import MANIFEST_NAME
from dflash_runtime.errors import OutputError

_PARTIAL, _OLD = "partial", "old"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_output_place(out: Path, needed_bytes: int) -> None:
    """Refuses an output place before any long work. What a killed build left there is removed.

    Args:
        out: Where the bundle shall lie.
        needed_bytes: Estimate of what will be written.

    Raises:
        OutputError: something else is there, the parent is not writable, or there is too little room.
    """
    clear_leftovers(out.absolute())
    if out.exists() and not (out / MANIFEST_NAME).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise OutputError(f"{out} exists and is not a bundle. Choose another --out, or remove it.")
    parent = out.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise OutputError(f"{parent} is a file, so {out} cannot be made below it. Choose another --out.")
    try:
        # Permission bits say nothing of read-only disks, quotas, or the superuser's powers.
        with tempfile.TemporaryDirectory(dir=parent, prefix=".dflash-"):
            pass
    except OSError as error:
        raise OutputError(f"{parent} cannot be written ({error.strerror or error}). Choose another --out.") from error
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
        OutputError: the folder cannot be made or moved, or the disk is full.
    """
    out = out.absolute()
    clear_leftovers(out)
    staging = _beside(out, _PARTIAL)
    _make(staging)
    with _held(staging), _no_room_said(out):
        try:
            yield staging
            take_place(staging, out)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


@contextlib.contextmanager
def resumable_folder(out: Path) -> Iterator[Path]:
    """Yields a folder beside `out` that outlives the process when it is killed or interrupted.

    What a killed process left is there; an error that is caught by nobody empties it, as it would only come again.

    Raises:
        OutputError: it cannot be made, the disk is full, or another process is at work in it.
    """
    out = out.absolute()
    clear_leftovers(out)
    staging = out.with_name(f".{out.name}.{_PARTIAL}")
    if not staging.is_dir():
        _make(staging)
    if not _is_free(staging):
        raise OutputError(f"another process is making {out} in {staging}. Wait for it, or choose another --out.")
    with _held(staging), _no_room_said(out):
        try:
            yield staging
        except Exception:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        shutil.rmtree(staging, ignore_errors=True)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise OutputError(f"{folder.parent} cannot be written: {error.strerror or error}.") from error


@contextlib.contextmanager
def _no_room_said(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        free = shutil.disk_usage(out.parent).free
        raise OutputError(
            f"writing {out} failed: {error.strerror}; {out.parent} has {free / 1e9:.2f} GB free. Make room or "
            "choose another --out."
        ) from error


def take_place(staging: Path, out: Path) -> None:
    """Moves a finished folder to `out`; an older bundle there goes when the new one has come.

    Raises:
        OutputError: it cannot be moved; the older bundle is where it was.
    """
    old = _beside(out, _OLD)
    try:
        if out.exists():
            with _held(out):
                out.rename(old)
                try:
                    staging.rename(out)
                except OSError:
                    old.rename(out)
                    raise
                shutil.rmtree(old, ignore_errors=True)
        else:
            staging.rename(out)
    except OSError as error:
        raise OutputError(f"moving the finished bundle to {out} failed: {error.strerror or error}.") from error


def _beside(out: Path, kind: str) -> Path:
    return out.with_name(f".{out.name}.{os.getpid()}.{kind}")


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Locks a folder, under whatever name, for as long as this process lives and works on it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def clear_leftovers(out: Path) -> None:
    """Removes what killed builds left beside `out`; an older bundle that was just being replaced is put back.

    Args:
        out: Place of a bundle, absolute.
    """
    if not out.parent.is_dir():
        return
    for path in out.parent.iterdir():
        number, _, kind = path.name.removeprefix(f".{out.name}.").partition(".")
        if path.name.startswith(f".{out.name}.") and number.isdigit() and kind in (_PARTIAL, _OLD) and _is_free(path):
            if kind == _OLD and not out.exists():
                path.rename(out)
            else:
                shutil.rmtree(path, ignore_errors=True)


def _is_free(folder: Path) -> bool:
    """Whether no living process holds a folder; a lock says so across containers too, where process ids do not."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return False  # it went away in this moment
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True

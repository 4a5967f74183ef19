"""Reads the JSON files of a checkpoint; imports nothing heavy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_runtime.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        CheckpointError: not JSON, or not an object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}).") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds {type(data).__name__} where an object is expected.")
    return data

"""What a drafter's training data was, as `train-drafter` leaves it beside the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_export.json_file import read_json
from dflash_runtime.errors import CheckpointError

DATA_RECORD = "data.json"


def recorded_template_args(folder: Path) -> dict[str, Any]:
    """Chat template arguments of the training data (thinking on or off), {} where nothing is recorded.

    Args:
        folder: The drafter's checkpoint.

    Raises:
        CheckpointError: the record cannot be read.
    """
    path = folder / DATA_RECORD
    if not path.is_file():
        return {}
    found = read_json(path).get("template_args", {})
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: template_args is {found!r} and must map names to values. Correct or remove it.")
    return found

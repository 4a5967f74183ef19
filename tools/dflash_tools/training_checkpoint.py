"""The state of a training on disk: a kill at any moment leaves the last whole one."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import torch

from dflash_runtime.errors import CheckpointError, OutputError

STATE_FILE = "state.pt"


@dataclasses.dataclass
class TrainingState:
    """Everything a training needs to go on as if it had never stopped."""

    settings: dict[str, Any]
    """What decides the result; a resumed run must have the same."""
    step: int
    """Steps done."""
    parameters: dict[str, torch.Tensor]
    """Of the drafter alone, in fp32."""
    optimizer: dict[str, Any]
    history: list[dict[str, float]]
    """What was reported so far."""
    recent_losses: list[float]
    """Of the steps since the last report."""
    seconds: float
    """Time spent training so far."""


def save_state(folder: Path, state: TrainingState) -> None:
    """Writes the state under a temporary name, then puts it in place of the last one.

    Raises:
        OutputError: it cannot be written.
    """
    path, temporary = folder / STATE_FILE, folder / f".{STATE_FILE}.partial"
    try:
        with temporary.open("wb") as stream:
            torch.save(dataclasses.asdict(state), stream)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}. The last state is kept.") from error


def load_state(folder: Path, settings: dict[str, Any]) -> TrainingState | None:
    """The state of a training with the same settings, None where there is none.

    Raises:
        CheckpointError: it cannot be read, or belongs to other settings; the first ones that differ are named.
    """
    path = folder / STATE_FILE
    if not path.is_file():
        return None
    try:
        state = TrainingState(**torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # torch raises many kinds for a damaged file
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}). Remove it to start anew.") from error
    wanted = json.loads(json.dumps(settings))
    differing = sorted(k for k in wanted.keys() | state.settings.keys() if wanted.get(k) != state.settings.get(k))
    if differing:
        words = "; ".join(f"{k} was {state.settings.get(k)!r} and is {wanted.get(k)!r}" for k in differing[:3])
        raise CheckpointError(
            f"{path} belongs to a training with other settings: {words}. Resume with the same ones, or choose another "
            "--out."
        )
    return state

"""Residuals of a real text, left by the fp16 guard for the layer gate.

Where a residual leaves fp16's range in one channel, the norms behind it count on that channel: after random residuals
such a layer would overflow as it never does in the model.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from dflash_export.build_stages import BuildStages
from dflash_export.graph_runner import Array
from dflash_export.reference_run import Step
from dflash_runtime.bundle import Manifest

_FILE = "residuals.npz"


def gated_layers(manifest: Manifest) -> list[int]:
    """The layers the layer gate compares: first, tapped and last."""
    return sorted({0, *manifest.taps.layer_ids, manifest.target.num_layers - 1})


def save_residuals(stages: BuildStages, residuals: Mapping[str, Array]) -> None:
    """Keeps what enters layers: `hidden_states.{i}` -> [1, S, H]."""
    path = stages.file(_FILE)
    if path is not None:
        temporary = path.with_suffix(".partial.npz")
        np.savez(temporary, **residuals)  # type: ignore[arg-type]
        temporary.replace(path)


def load_residuals(stages: BuildStages, index: int, steps: list[Step]) -> list[Tensor] | None:
    """What enters a layer in each call, [1, rows of the call, H], by the rows' positions; None where none was kept."""
    path = stages.file(_FILE)
    if path is None or not path.is_file():
        return None
    with np.load(path) as kept:
        rows = torch.from_numpy(kept[f"hidden_states.{index}"])
    positions = [torch.arange(step.position, step.position + len(step.ids)) % rows.shape[1] for step in steps]
    return [rows[:, own] for own in positions]

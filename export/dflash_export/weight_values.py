"""Weights of a bundle as arrays, for checks on models that fit into memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch

from dflash_export.weight_store import TORCH_DTYPES
from dflash_runtime.bundle import Manifest, WeightEntry


def weights_as_float32(root: Path, manifest: Manifest, model: ir.Model) -> dict[str, npt.NDArray[Any]]:
    """fp32 copies of the weights a graph uses, by initializer name."""
    weights = {name: entry for name, entry in manifest.weights.items() if entry.dtype in TORCH_DTYPES}
    used = [name for name in model.graph.initializers if name in weights]
    return {name: read_weight(root, manifest.weights[name]).float().numpy() for name in used}


def read_weight(root: Path, entry: WeightEntry) -> torch.Tensor:
    """One weight in its stored dtype, mapped from the file."""
    data = np.memmap(
        root / entry.file, dtype=np.uint8, mode="c", offset=entry.offset_bytes, shape=(entry.length_bytes,)
    )
    return torch.from_numpy(data).view(TORCH_DTYPES[entry.dtype]).view(entry.shape)

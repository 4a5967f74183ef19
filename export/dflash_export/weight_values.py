"""Weights of a checkpoint or a bundle as tensors, read in pieces so that no file is ever mapped or held whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime as ort
import torch

from dflash_export.tensor_files import TensorPlace
from dflash_export.weight_store import TORCH_DTYPES
from dflash_runtime.bundle import Manifest, WeightEntry


def weights_as_float32(root: Path, manifest: Manifest, model: ir.Model) -> dict[str, npt.NDArray[Any]]:
    """fp32 copies of the float weights a graph reads from the bundle's files, by initializer name."""
    weights = {name: entry for name, entry in manifest.weights.items() if entry.dtype in TORCH_DTYPES}
    stored = [n for n, v in model.graph.initializers.items() if isinstance(v.const_value, ir.ExternalTensor)]
    used = [name for name in stored if name in weights]
    return {name: read_converted(place_of(root, manifest.weights[name]), torch.float32).numpy() for name in used}


def read_weight(root: Path, entry: WeightEntry) -> torch.Tensor:
    """One weight in its stored dtype, mapped from the file."""
    data = np.memmap(
        root / entry.file, dtype=np.uint8, mode="c", offset=entry.offset_bytes, shape=(entry.length_bytes,)
    )
    return torch.from_numpy(data).view(TORCH_DTYPES[entry.dtype]).view(entry.shape)


def place_of(root: Path, entry: WeightEntry) -> TensorPlace:
    """Where a weight of a bundle lies."""
    return TensorPlace(root / entry.file, entry.offset_bytes, entry.length_bytes, entry.dtype, tuple(entry.shape))


def read_converted(place: TensorPlace, *dtypes: torch.dtype) -> torch.Tensor:
    """A tensor converted to each of `dtypes` in turn; only the result is ever in memory whole.

    Raises:
        CheckpointError: the file ends early.
    """
    stored = TORCH_DTYPES[place.dtype]
    result = torch.empty(math.prod(place.shape), dtype=dtypes[-1] if dtypes else stored)
    done = 0
    for piece in place.chunks():
        values = torch.frombuffer(bytearray(piece), dtype=stored)
        for dtype in dtypes[:-1]:
            values = values.to(dtype)
        result[done : done + values.numel()] = values
        done += values.numel()
    return result.view(place.shape)


class BundleWeights:
    """Reads the initializers of a bundle's graphs, in the element type each graph wants."""

    def __init__(
        self,
        root: Path,
        entries: Mapping[str, WeightEntry],
        cut: Mapping[str, npt.NDArray[Any]] | None = None,
        places: Mapping[str, TensorPlace] | None = None,
    ) -> None:
        """Reads nothing yet.

        Args:
            root: The bundle.
            entries: Its weight index.
            cut: Rows to use in place of whole tables, in fp32.
            places: Weights that lie elsewhere than the index says.
        """
        self._root, self._entries, self._cut, self._places = root, entries, cut or {}, places or {}

    def __call__(self, tensor: onnx.TensorProto, rows: slice) -> ort.OrtValue:
        """Some rows of an initializer with external data."""
        wanted = ir.DataType(tensor.data_type)
        if tensor.name in self._cut:
            return ort.OrtValue.ortvalue_from_numpy(self._cut[tensor.name][rows])
        start, stop, _ = rows.indices(tensor.dims[0])
        place = self._place(tensor).rows(start, stop)
        if wanted == ir.DataType.FLOAT:
            return ort.OrtValue.ortvalue_from_numpy(read_converted(place, torch.float32).numpy())
        stored = read_converted(place, torch.float16 if wanted == ir.DataType.FLOAT16 else torch.bfloat16)
        bits = stored.view(torch.uint16) if stored.element_size() == 2 else stored
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits.numpy(), tensor.data_type)

    def _place(self, tensor: onnx.TensorProto) -> TensorPlace:
        entry = self._entries.get(tensor.name)
        if tensor.name in self._places:
            return self._places[tensor.name]
        if entry is not None:
            return place_of(self._root, entry)
        # A span of several weights, which a lowering pass made.
        facts = {item.key: item.value for item in tensor.external_data}
        dtype = {ir.DataType.FLOAT: "F32", ir.DataType.FLOAT16: "F16", ir.DataType.BFLOAT16: "BF16"}
        return TensorPlace(
            self._root / facts["location"],
            int(facts["offset"]),
            int(facts["length"]),
            dtype[ir.DataType(tensor.data_type)],
            tuple(tensor.dims),
        )

"""Puts weights of a graph into a file in a chosen order, as a bundle has them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir


def store(model: ir.Model, folder: Path, names: Sequence[str], gap_bytes: int = 0) -> ir.Model:
    """The model with the named weights one after the other in `folder/weights.bin`; the rest stays inline."""
    stored = model.clone()
    with (folder / "weights.bin").open("wb") as stream:
        stream.write(b"head")
        for name in names:
            value = stored.graph.initializers[name]
            tensor = value.const_value
            assert tensor is not None
            value.const_value = ir.ExternalTensor(
                "weights.bin", stream.tell(), tensor.nbytes, tensor.dtype, shape=ir.Shape(tensor.shape), name=name,
                base_dir=folder,
            )
            stream.write(tensor.tobytes() + bytes(gap_bytes))
    return stored


def matrices_then_vectors(model: ir.Model) -> list[str]:
    """The order of a bundle: weights of the layers as they come, biases and norms after the matrices."""
    names = [name for name in model.graph.initializers if name.startswith("layers.")]
    return sorted(names, key=lambda name: len(model.graph.initializers[name].shape or ()) < 2)

"""The weights of a quantised bundle as TensorRT's networks take them, given to ONNX Runtime."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir

from dflash_engines.passes.signed_weights import SIGNED_FILE, SignedWeightsPass
from dflash_engines.signed_weight_file import write_signed_weights
from dflash_engines.tensorrt_network import HALF_TYPES
from dflash_export.dequantized_weights import read_integers
from dflash_export.deviation import Array
from dflash_runtime.bundle import Bundle
from dflash_runtime.weights import MappedWeights


@contextlib.contextmanager
def signed_weights(bundle: Bundle, model: ir.Model) -> Iterator[dict[str, Array]]:
    """Gives a portable graph of a quantised bundle the signed form, with a file of what engines embed.

    Args:
        bundle: In fp16 or bf16.
        model: One of its graphs, changed in place; sessions are opened while the file is there.

    Yields:
        Weights that engines take as inputs in another layout than the bundle's, by name.

    Raises:
        EngineError: weights that TensorRT does not take.
    """
    if not bundle.manifest.quantized:
        yield {}
        return
    signing = SignedWeightsPass(HALF_TYPES[bundle.manifest.precision])
    signing(model)
    file, mapped = bundle.path / f".{SIGNED_FILE}.{os.getpid()}", MappedWeights(bundle)
    turned: dict[str, Array] = {}
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and tensor.location == SIGNED_FILE:
            value.const_value = ir.ExternalTensor(
                file.name, tensor.offset, tensor.length, tensor.dtype,
                shape=tensor.shape, name=name, base_dir=bundle.path,
            )  # fmt: skip
            if name in bundle.manifest.weights and tensor.dtype in HALF_TYPES.values():  # scales
                turned[name] = np.ascontiguousarray(mapped.float32(name).T)
        elif value.dtype == ir.DataType.INT8:
            integers = read_integers(bundle.path, bundle.manifest.weights[name])
            turned[name] = np.ascontiguousarray((integers ^ np.uint8(0x80)).view(np.int8).T)
    try:
        write_signed_weights(bundle, signing.parts, file)
        _append_turned_floats(bundle, model, file)
        yield turned
    finally:
        file.unlink(missing_ok=True)


def _append_turned_floats(bundle: Bundle, model: ir.Model, file: Path) -> None:
    """FP8 weights as [in, out] at the end of the file: NumPy has no type to give them to a session in."""
    with file.open("ab") as stream:
        for name, value in model.graph.initializers.items():
            if value.dtype != ir.DataType.FLOAT8E4M3FN:
                continue
            turned = np.ascontiguousarray(read_integers(bundle.path, bundle.manifest.weights[name]).T)
            offset = stream.tell() + -stream.tell() % 64
            stream.write(bytes(offset - stream.tell()))
            stream.write(turned.tobytes())
            value.const_value = ir.ExternalTensor(
                file.name, offset, turned.nbytes, value.dtype,
                shape=ir.Shape(turned.shape), name=name, base_dir=bundle.path,
            )  # fmt: skip

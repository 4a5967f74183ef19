"""Random weights streamed into a safetensors file: no tensor is ever held whole."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

CHUNK_ELEMENTS = 1 << 22
ITEM_BYTES = {"F32": 4, "BF16": 2}


def write_random_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
    seed: int,
) -> int:
    """Writes one tensor after the other, scaled so that activations neither vanish nor blow up.

    Matrices [out, in] have standard deviation 1/sqrt(in); norm scales lie around 1, biases around 0.

    Args:
        path: File to make.
        shapes: Name -> shape.
        dtype: `F32` or `BF16`.
        seed: The same seed gives the same file.

    Returns:
        Parameters written.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(seed)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            middle, spread = _distribution(name, shape)
            left = math.prod(shape)
            while left:
                count = min(left, CHUNK_ELEMENTS)
                values = rng.standard_normal(count, dtype=np.float32) * spread + middle
                stream.write(values.tobytes() if dtype == "F32" else _bf16_bytes(values))
                left -= count
    return sum(math.prod(shape) for shape in shapes.values())


def _distribution(name: str, shape: tuple[int, ...]) -> tuple[np.float32, np.float32]:
    if len(shape) == 2:
        return np.float32(0), np.float32(shape[1] ** -0.5)
    return np.float32(1 if name.endswith("norm.weight") else 0), np.float32(0.1)


def _bf16_bytes(values: np.ndarray) -> bytes:
    """The upper halves of the fp32 bits: rounded towards zero, which is as good as any for random values."""
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()

"""AWQ (AutoAWQ's `gemm` layout): int32 words along the outputs, in an order of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from dflash_export.quantized_formats.imported_place import Array, as_floats, imported_place, mapped, unpack
from dflash_export.quantized_formats.weight_parts import take_parts
from dflash_export.tensor_files import TensorPlace
from dflash_runtime.errors import CheckpointError

ORIGIN = "AWQ"
_PARTS = ("qweight", "qzeros", "scales")
_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])
"""The output that each four bits of a word belong to, lowest bits first."""


def read_places(config: dict[str, Any], places: Mapping[str, TensorPlace]) -> dict[str, TensorPlace]:
    """See `read_quantized_places`.

    Raises:
        CheckpointError: another layout, a width other than 4, or tensors missing.
    """
    # AutoAWQ says `version`, GPTQModel says `checkpoint_format` and `format`.
    said = [config[key] for key in ("version", "checkpoint_format", "format") if config.get(key)]
    version, bits = str(said[0] if said else "gemm").lower(), int(config.get("bits", config.get("w_bit", 4)))
    if version != "gemm" or bits != 4:
        raise CheckpointError(f"AWQ weights of {bits} bits in the layout {version!r} are not taken; 4 bits, gemm are.")
    found = dict(places)
    for name in places:
        module, _, part = name.rpartition(".")
        if part == "qweight":
            own = take_parts(found, module, _PARTS, ("scales",), ORIGIN)
            found[f"{module}.weight"] = _place(own)
    return found


def _place(own: dict[str, TensorPlace]) -> TensorPlace:
    words, scale, zeros = own["qweight"], own["scales"], own.get("qzeros")
    columns, rows, groups = words.shape[0], words.shape[1] * 8, scale.shape[0]

    def read(start: int, stop: int) -> tuple[Array, Tensor, Array | None]:
        part = slice(start // 8, stop // 8)
        points = None if zeros is None else _outputs(mapped(zeros)[:, part])
        return _outputs(mapped(words)[:, part]), as_floats(mapped(scale)[:, start:stop].T, scale.dtype), points

    group = None if groups == 1 else columns // groups
    return imported_place(words, (rows, columns), 4, group, zeros is None, scale.dtype, ORIGIN, read, row_step=8)


def _outputs(words: Array) -> Array:
    """Words [k, n / 8] as integers [n, k]."""
    parts = unpack(words, 4, 1).reshape(words.shape[0], -1, 8)
    ordered = np.empty_like(parts)
    ordered[:, :, _ORDER] = parts
    return ordered.reshape(words.shape[0], -1).T

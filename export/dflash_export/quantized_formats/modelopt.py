"""ModelOpt's Hugging Face export: int4 in groups, two outputs in a byte, and FP8 with one scale a matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from dflash_export.quantized_formats.imported_place import Array, as_floats, float8_place, imported_place, mapped
from dflash_export.quantized_formats.weight_parts import drop_cache_scales, take_parts
from dflash_export.tensor_files import FLOAT8, TensorPlace
from dflash_runtime.errors import CheckpointError

ORIGIN = "ModelOpt"
_ALGORITHMS = ("W4A16_AWQ", "W4A16", "INT4_AWQ", "FP8", "FP8_PER_CHANNEL_PER_TOKEN")


def read_places(config: dict[str, Any], places: Mapping[str, TensorPlace]) -> dict[str, TensorPlace]:
    """See `read_quantized_places`.

    Raises:
        CheckpointError: another algorithm, inputs that are scaled before the product, or tensors missing.
    """
    config = {**config, **config.get("quantization", {})}  # nested in hf_quant_config.json
    algorithm = str(config.get("quant_algo", "unknown"))
    if algorithm.upper() not in _ALGORITHMS:
        raise CheckpointError(f"ModelOpt's {algorithm} is not taken; {', '.join(_ALGORITHMS)} are (int4, FP8).")
    scaled = sorted(name for name in places if name.endswith("pre_quant_scale"))
    if scaled:
        raise CheckpointError(
            f"{len(scaled)} modules scale their inputs before the product ({', '.join(scaled[:3])}), which is not "
            "taken. Export the checkpoint with pre_quant_scale folded into the layer before."
        )
    found = dict(places)
    drop_cache_scales(found, config.get("kv_cache_scheme") or config.get("kv_cache_quant_algo"))
    for name, place in places.items():
        module, _, part = name.rpartition(".")
        if part == "weight" and place.dtype in ("U8", FLOAT8):
            scale = take_parts(found, module, ("weight_scale",), ("weight_scale",), ORIGIN)["weight_scale"]
            found[name] = float8_place(place, scale, ORIGIN) if place.dtype == FLOAT8 else _place(place, scale)
            found.pop(f"{module}.input_scale", None)
    return found


def _place(pairs: TensorPlace, scale: TensorPlace) -> TensorPlace:
    rows, columns = pairs.shape[0] * 2, pairs.shape[1]

    def read(start: int, stop: int) -> tuple[Array, Tensor, Array | None]:
        stored = mapped(pairs)[start // 2 : stop // 2]
        values = np.stack([stored & 15, stored >> 4], axis=1).reshape(-1, columns) ^ np.uint8(8)
        return values, as_floats(mapped(scale)[start:stop], scale.dtype), None

    group = columns // scale.shape[1]
    return imported_place(pairs, (rows, columns), 4, group, True, scale.dtype, ORIGIN, read, row_step=2)

"""compressed-tensors: `pack-quantized` (int4, int8 in int32 words), `int-quantized` (int8), `float-quantized` (FP8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from dflash_export.quantized_formats.imported_place import (
    Array,
    as_floats,
    float8_place,
    imported_place,
    mapped,
    unpack,
)
from dflash_export.quantized_formats.weight_parts import drop_cache_scales, take_parts
from dflash_export.tensor_files import FLOAT8, TensorPlace
from dflash_runtime.errors import CheckpointError

ORIGIN = "compressed-tensors"
_PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "input_scale", "weight")
_LAYOUTS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
_OFFLINE = ("weight_input", "weight_output")
"""Where a rotation is part of the stored weights; anywhere else it is done while the model runs."""


def read_places(config: dict[str, Any], places: Mapping[str, TensorPlace]) -> dict[str, TensorPlace]:
    """See `read_quantized_places`.

    Raises:
        CheckpointError: activations or caches are quantised too, columns are reordered, inputs are rotated, another
            format, or tensors missing.
    """
    _refuse_more_than_weights(config)
    _refuse_other_layouts(config)
    found = dict(places)
    drop_cache_scales(found, config.get("kv_cache_scheme"))
    for name in places:
        module, _, part = name.rpartition(".")
        packed = part == "weight_packed"
        plain = part == "weight" and places[name].dtype in ("I8", FLOAT8)
        if not packed and not plain:
            continue
        own = take_parts(found, module, _PARTS, ("weight_scale",), ORIGIN)
        args = _arguments(config, module)
        _refuse_reordered(module, own, args)
        if places[name].dtype == FLOAT8:
            found[name] = float8_place(own["weight"], own["weight_scale"], ORIGIN)
            continue
        read = _packed if packed else _plain
        found[f"{module}.weight"] = read(module, own, int(args["num_bits"]))
    return found


def _packed(module: str, own: dict[str, TensorPlace], bits: int) -> TensorPlace:
    words, scale = own["weight_packed"], own["weight_scale"]
    if bits not in (4, 8):
        raise CheckpointError(f"{module} is packed in {bits} bits; 4 and 8 are taken.")
    rows, columns = words.shape[0], words.shape[1] * 32 // bits
    points, per_word = own.get("weight_zero_point"), 32 // bits

    def read(start: int, stop: int) -> tuple[Array, Tensor, Array | None]:
        values = unpack(mapped(words)[start:stop], bits, 1)
        scales = as_floats(mapped(scale)[start:stop], scale.dtype)
        if points is None:
            return values, scales, None
        zeros = unpack(mapped(points)[start // per_word : -(-stop // per_word)], bits, 0)
        return values, scales, zeros[: stop - start]

    group = None if scale.shape[1] == 1 else columns // scale.shape[1]
    return imported_place(
        words, (rows, columns), bits, group, points is None, scale.dtype, ORIGIN, read, row_step=per_word
    )


def _plain(module: str, own: dict[str, TensorPlace], bits: int) -> TensorPlace:
    values, scale = own["weight"], own["weight_scale"]
    rows, columns = values.shape
    if bits != 8 or "weight_zero_point" in own or scale.shape not in ((rows, 1), (rows,)):
        raise CheckpointError(
            f"{module} is int-quantized with {bits} bits and scales of shape {list(scale.shape)}; int8 with one scale "
            "a channel and no zero point is taken."
        )

    def read(start: int, stop: int) -> tuple[Array, Tensor, Array | None]:
        stored = mapped(values)[start:stop].view(np.uint8) ^ np.uint8(0x80)
        return stored, as_floats(mapped(scale)[start:stop], scale.dtype).reshape(-1, 1), None

    return imported_place(values, (rows, columns), 8, None, True, scale.dtype, ORIGIN, read)


def _refuse_more_than_weights(config: dict[str, Any]) -> None:
    for group in config.get("config_groups", {}).values():
        if (group.get("weights") or {}).get("type") == "float":
            continue  # FP8 is nearly always written for FP8 activations too, and its weights mean the same without
        if group.get("input_activations") or group.get("output_activations"):
            raise CheckpointError(
                "the checkpoint quantises activations too (W8A8 or the like), which is not taken; give one that "
                "quantises weights alone (W4A16, W8A16)."
            )


def _refuse_other_layouts(config: dict[str, Any]) -> None:
    groups = list(config.get("config_groups", {}).values())
    layouts = {one.get("format") for one in (config, *groups)} - {None, *_LAYOUTS}
    if layouts:
        raise CheckpointError(
            f"compressed-tensors' {', '.join(sorted(layouts))} is not taken; {', '.join(_LAYOUTS)} are (int4, int8, "
            "FP8)."
        )
    sparsity = (config.get("sparsity_config") or {}).get("format") or "dense"
    if sparsity != "dense":
        raise CheckpointError(f"the checkpoint's weights are stored sparse ({sparsity}), which is not taken.")
    for transform in ((config.get("transform_config") or {}).get("config_groups") or {}).values():
        places = {str(one.get("location")) for one in transform.get("apply", [])} - {*_OFFLINE}
        if places:
            raise CheckpointError(
                f"the checkpoint rotates {', '.join(sorted(places))} while the model runs (transform_config), which is "
                "not taken. Give one whose rotations are all part of its weights."
            )


def _refuse_reordered(module: str, own: dict[str, TensorPlace], args: dict[str, Any]) -> None:
    """Act-order that only chose the order of rounding ("weight", "static") leaves plain groups, and is taken."""
    order, said = own.get("weight_g_idx"), args.get("actorder")
    if order is None:
        reordered = said in (True, "group", "dynamic")
    else:
        given = mapped(order).astype(np.int64)
        groups = own["weight_scale"].shape[-1]
        plain = np.arange(len(given)) // max(1, len(given) // groups)
        reordered = not (np.all(given == -1) or np.array_equal(given, plain))  # -1: the library never filled it
    if reordered:
        raise CheckpointError(
            f"{module} is quantised with act-order (actorder {said!r}: its inputs belong to groups in another order), "
            'which has no kernels here. Give a checkpoint made with actorder "weight" or without act-order.'
        )


def _arguments(config: dict[str, Any], module: str) -> dict[str, Any]:
    """What the config says of a module's weights; one group of modules is the rule."""
    found = [group["weights"] for group in config.get("config_groups", {}).values() if group.get("weights")]
    if not found or any(one.get("num_bits") != found[0].get("num_bits") for one in found):
        raise CheckpointError(f"{module}: config.json has {len(found)} kinds of quantised weights; one width is taken.")
    if found[0].get("type", "int") != "int" and int(found[0]["num_bits"]) != 8:
        raise CheckpointError(
            f"{module} holds {found[0]['type']} weights of {found[0]['num_bits']} bits; int4, int8 and FP8 are taken."
        )
    return dict(found[0])

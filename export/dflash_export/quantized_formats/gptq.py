"""GPTQ: int32 words along the inputs, zero points one too low in the first version of the format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from dflash_export.quantized_formats.imported_place import Array, as_floats, imported_place, mapped, unpack
from dflash_export.quantized_formats.weight_parts import take_parts
from dflash_export.tensor_files import TensorPlace
from dflash_runtime.errors import CheckpointError

ORIGIN = "GPTQ"
_PARTS = ("qweight", "qzeros", "scales", "g_idx")


def read_places(config: dict[str, Any], places: Mapping[str, TensorPlace]) -> dict[str, TensorPlace]:
    """See `read_quantized_places`.

    Raises:
        CheckpointError: a width other than 4 and 8, columns in another order (act-order), inputs that are rotated
            when the model runs, or tensors missing.
    """
    bits = config.get("bits")
    if bits not in (4, 8):
        raise CheckpointError(f"GPTQ weights of {bits} bits are not taken; 4 and 8 are.")
    if config.get("rotation"):
        raise CheckpointError(
            f"the checkpoint's weights are rotated (rotation {config['rotation']!r}), and its inputs would have to be "
            "rotated too while it runs, which is not taken. Give a checkpoint made without rotation."
        )
    later = config.get("checkpoint_format", "gptq")
    if later not in ("gptq", "gptq_v2"):
        raise CheckpointError(f"GPTQ checkpoint_format {later!r} is not taken; gptq and gptq_v2 are.")
    found = dict(places)
    for name in places:
        module, _, part = name.rpartition(".")
        if part == "qweight":
            # Where a library reorders inputs, g_idx says so, whatever the config says: with static groups or group
            # aware ordering the groups end up in a row again.
            needed = ("qzeros", "scales", "g_idx") if config.get("desc_act") else ("qzeros", "scales")
            own = take_parts(found, module, _PARTS, needed, ORIGIN)
            found[f"{module}.weight"] = _place(module, own, bits, 0 if later == "gptq_v2" else 1)
    return found


def _place(module: str, own: dict[str, TensorPlace], bits: int, lowered: int) -> TensorPlace:
    words, scale = own["qweight"], own["scales"]
    per_word = 32 // bits
    rows, columns, groups = words.shape[1], words.shape[0] * per_word, scale.shape[0]
    if "g_idx" in own:
        order = mapped(own["g_idx"]).astype(np.int64)
        if len(order) != columns:
            raise CheckpointError(
                f"{module} has g_idx for {len(order)} inputs and words for {columns} of {bits} bits: config.json's "
                "bits belong to other weights, or differ from module to module, which is not taken."
            )
        if not np.array_equal(order, np.arange(columns) // (columns // groups)):
            raise CheckpointError(
                f"{module} is quantised with act-order (desc_act: its inputs belong to groups in another order), which "
                "has no kernels here. Give a checkpoint made with desc_act false."
            )
    zeros = (unpack(mapped(own["qzeros"]), bits, 1) + np.uint8(lowered)) & np.uint8((1 << bits) - 1)  # [groups, out]
    middle = 1 << (bits - 1)

    def read(start: int, stop: int) -> tuple[Array, Tensor, Array | None]:
        values = unpack(mapped(words)[:, start:stop], bits, 0).T
        return values, as_floats(mapped(scale)[:, start:stop].T, scale.dtype), zeros[:, start:stop].T

    group = None if groups == 1 else columns // groups
    symmetric = bool((zeros == middle).all())
    return imported_place(words, (rows, columns), bits, group, symmetric, scale.dtype, ORIGIN, read)

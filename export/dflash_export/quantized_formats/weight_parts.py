"""The tensors that one quantised weight is stored in, taken out of a checkpoint together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dflash_export.tensor_files import TensorPlace
from dflash_runtime.errors import CheckpointError


def take_parts(
    places: dict[str, TensorPlace], module: str, parts: Iterable[str], needed: Iterable[str], origin: str
) -> dict[str, TensorPlace]:
    """Takes a module's tensors out of `places`.

    Args:
        places: Checkpoint name -> tensor; those of the module are removed.
        module: Its name.
        parts: Last parts of the names that belong to a weight.
        needed: Those without which its values are unknown.
        origin: The format, for messages.

    Raises:
        CheckpointError: one that is needed is not there, or integers are packed into other words than int32.
    """
    own = {part: places.pop(f"{module}.{part}") for part in parts if f"{module}.{part}" in places}
    missing = [part for part in needed if part not in own]
    if missing:
        raise CheckpointError(
            f"{module} is quantised ({origin}) and the checkpoint holds no {' and no '.join(missing)} for it, so "
            "nobody knows what its values are. Download the checkpoint again, or give another one."
        )
    for part in ("qweight", "qzeros", "weight_packed", "weight_zero_point"):
        if part in own and own[part].dtype != "I32":
            raise CheckpointError(
                f"{module}.{part} ({origin}) holds {own[part].dtype}; integers packed into I32 are taken. Write the "
                "checkpoint again with a newer version of its library."
            )
    return own


def drop_cache_scales(places: dict[str, TensorPlace], scheme: Any) -> None:
    """Takes the scales of an FP8 KV cache away: weights mean the same without, and the cache here is no smaller float.

    Args:
        places: Checkpoint name -> tensor; changed in place.
        scheme: What the config says of the cache; None where it says nothing.

    Raises:
        CheckpointError: the cache is quantised to something else, for which the weights may have been made.
    """
    if not scheme:
        return
    floating = scheme.get("type") == "float" and scheme.get("num_bits", 8) == 8 if isinstance(scheme, dict) else (
        str(scheme).upper() == "FP8"
    )
    if not floating:
        raise CheckpointError("the checkpoint quantises its KV cache too, which is not taken; only weights are.")
    for name in [name for name in places if name.endswith((".k_scale", ".v_scale", ".q_scale"))]:
        del places[name]

"""Weights that others have quantised, taken as they are: one module a format, one table of formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dflash_export.quantized_formats import awq, compressed_tensors, gptq, modelopt
from dflash_export.quantized_formats.imported_place import ImportedPlace
from dflash_export.tensor_files import TensorPlace
from dflash_runtime.errors import CheckpointError

Places = Mapping[str, TensorPlace]
_FORMATS: dict[str, Callable[[dict[str, Any], Places], dict[str, TensorPlace]]] = {
    "awq": awq.read_places,
    "compressed-tensors": compressed_tensors.read_places,
    "gptq": gptq.read_places,
    "modelopt": modelopt.read_places,
}


def import_notes(config: dict[str, Any]) -> list[str]:
    """What a quantised checkpoint asks for beside its weights and does not get, in words for the user."""
    nested = {**config, **config.get("quantization", {})}
    groups = [one for one in (nested.get("config_groups") or {}).values() if isinstance(one, dict)]
    parts = []
    if any(one.get("input_activations") for one in groups) or str(nested.get("quant_algo", "")).startswith("FP8"):
        parts.append("activations")
    if nested.get("kv_cache_scheme") or nested.get("kv_cache_quant_algo"):
        parts.append("KV cache")
    if not parts:
        return []
    return [f"the checkpoint was made for {' and '.join(parts)} in FP8 too; here its weights alone are in FP8"]


def read_quantized_places(config: dict[str, Any], places: Places, where: str) -> dict[str, TensorPlace]:
    """A checkpoint's tensors, the parts of each quantised weight replaced by one `ImportedPlace` under its name.

    Args:
        config: `quantization_config` of the checkpoint's config.json.
        places: Its tensors.
        where: The checkpoint, for messages.

    Raises:
        CheckpointError: a format or a variant of one that is not taken, by its name.
    """
    method = str(config.get("quant_method", "unknown"))
    read = _FORMATS.get(method)
    if read is None:
        raise CheckpointError(
            f"{where} is quantised ({method}); taken as they are: {', '.join(sorted(_FORMATS))}. Give one of these, or "
            "the original half-precision checkpoint."
        )
    found = read(config, places)
    if not any(isinstance(place, ImportedPlace) for place in found.values()):
        raise CheckpointError(f"{where} says it is quantised ({method}) and holds no weight of that format.")
    return found

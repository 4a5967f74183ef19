"""The drafter's rotary embedding: where its settings may stand, and its frequencies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dflash_runtime.errors import CheckpointError, UnsupportedModelError

SUPPORTED_TYPES = ("default", "linear", "yarn", "llama3")


def read_rope_parameters(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Collects base and scaling from the spellings in use.

    `rope_theta` stands at top level or in `rope_parameters` or `rope_scaling`; the scaling's type is called `type`
    or `rope_type`.

    Args:
        config: Content of config.json.
        where: Path of the file, for messages.

    Returns:
        `rope_type`, `rope_theta` and what the type needs, as Transformers 5 spells them.

    Raises:
        CheckpointError: no base, or two places that differ.
        UnsupportedModelError: a type whose frequencies change with the length, or an unknown one.
    """
    places = {"rope_parameters": config.get("rope_parameters"), "rope_scaling": config.get("rope_scaling")}
    tables = {name: _normalised(name, table, where) for name, table in places.items() if table}
    scalings = [{k: v for k, v in table.items() if k != "rope_theta"} for table in tables.values()]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise CheckpointError(
            f"{where}: rope_parameters {scalings[0]} and rope_scaling {scalings[1]} differ. Keep one."
        )
    thetas = {"rope_theta": config.get("rope_theta")}
    thetas |= {f"{name}.rope_theta": table.get("rope_theta") for name, table in tables.items()}
    given = {name: value for name, value in thetas.items() if value is not None}
    if not given:
        raise CheckpointError(
            f"{where} states no base of the rotary embedding. Accepted keys: rope_theta, rope_parameters.rope_theta, "
            "rope_scaling.rope_theta."
        )
    if len({float(value) for value in given.values()}) > 1:
        listed = " and ".join(f"{name} {value}" for name, value in given.items())
        raise CheckpointError(f"{where} contradicts itself: {listed}. Keep the one the drafter was trained with.")
    scaling = scalings[0] if scalings else {"rope_type": "default"}
    if scaling["rope_type"] not in SUPPORTED_TYPES:
        raise UnsupportedModelError(
            f"{where} uses rope type {scaling['rope_type']!r}; supported are {', '.join(SUPPORTED_TYPES)}."
        )
    return {**scaling, "rope_theta": float(next(iter(given.values())))}


def _normalised(name: str, table: Any, where: str) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise CheckpointError(f"{where}: {name} is {table!r} where an object is expected.")
    if any(isinstance(value, dict) for value in table.values()):
        raise UnsupportedModelError(
            f"{where}: {name} differs by layer type ({', '.join(table)}), which is not supported."
        )
    kinds = {table[key] for key in ("rope_type", "type") if key in table}
    if len(kinds) > 1:
        raise CheckpointError(f"{where}: {name} names two types, {' and '.join(sorted(map(str, kinds)))}. Keep one.")
    rest = {key: value for key, value in table.items() if key not in ("rope_type", "type")}
    return {"rope_type": str(kinds.pop()) if kinds else "default", **rest}


def rope_frequencies(
    parameters: Mapping[str, Any], head_dim: int, max_position_tokens: int | None, where: str
) -> tuple[Tensor, float]:
    """Frequencies of the rotary pairs and the factor of cosine and sine, as Transformers computes them.

    Args:
        parameters: As `read_rope_parameters` gives them.
        head_dim: D.
        max_position_tokens: `max_position_embeddings`, which some types use when their own key is absent.
        where: Path of the config, for messages.

    Returns:
        inverse frequencies [D/2] in fp32, attention factor.

    Raises:
        CheckpointError: a key the type needs is missing or has no usable value.
    """
    limits = {} if max_position_tokens is None else {"max_position_embeddings": max_position_tokens}
    try:
        config = Qwen3Config(
            hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, rope_parameters=dict(parameters), **limits
        )
        rotary = Qwen3RotaryEmbedding(config)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{where}: rope settings {dict(parameters)} are incomplete or wrong for their type "
            f"({type(error).__name__}: {error})."
        ) from error
    return rotary.inv_freq.to(torch.float32), float(rotary.attention_scaling)

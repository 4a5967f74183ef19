"""A drafter's facts, from the config.json layouts in use.

Keys moved between config.json's top level and its `dflash_config` over time; both places are read, and two places
that disagree are an error, because a wrong guess shows only as lower acceptance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_export.drafter_attention import LayerAttention, read_layer_attention
from dflash_export.drafter_kinds import DFLASH2_ARCHITECTURE, SERVED, refuse_other_kinds
from dflash_export.drafter_layouts import find_layout
from dflash_export.drafter_rope import read_rope_parameters, rope_frequencies
from dflash_export.json_file import read_json
from dflash_runtime.errors import CheckpointError, UnsupportedModelError

DEFAULT_BLOCK_SIZE = 16
"""What the authors' package takes when a config states none."""


@dataclasses.dataclass(frozen=True)
class DFlash2Config:
    """What DFlash 2 adds: convolutions over the block, and a selector among the likeliest candidates."""

    conv_kernel_size: int
    """Block tokens a convolution sees, the token itself counted."""
    conv_group_size: int
    """Neighbouring channels that share one token-dependent kernel."""
    selector_rank: int
    selector_top_k: int
    """Candidates of each slot."""


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """What the exporter needs to know of a drafter, every default settled."""

    layout: str
    """How its checkpoint is written; see `drafter_layouts`."""
    architecture: str
    num_layers: int
    hidden_size: int
    target_hidden_size: int
    """Width of one tap; equal to `hidden_size` in every drafter that borrows the target's embedding."""
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int | None
    """None where the config leaves it to the target."""
    draft_vocab_size: int | None
    """Rows of a head of its own over part of the vocabulary; None for the whole vocabulary."""
    rms_norm_eps: float
    attention_bias: bool
    """q, k, v and o projections all have biases."""
    layers: tuple[LayerAttention, ...]
    rope_parameters: dict[str, Any]
    max_position_tokens: int | None
    target_layer_ids: tuple[int, ...]
    """0-based target layers, in the order their outputs are concatenated."""
    num_target_layers: int | None
    mask_token_id: int
    block_size: int
    """Tokens of a block, anchor included."""
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float | None
    dflash2: DFlash2Config | None = None
    """None for DFlash."""
    made_for: str | None = None
    """The target it names, where its layout has a place for that."""
    unknown_keys: tuple[str, ...] = ()
    """Config keys that may change what it computes and that are not known here."""
    notes: tuple[str, ...] = ()
    """What was settled without the config saying so, for the user."""

    @property
    def windows(self) -> list[int | None]:
        """Per layer the attention window in tokens."""
        return [layer.window_tokens for layer in self.layers]


def read_drafter_config(folder: Path) -> DrafterConfig:
    """Reads a checkpoint folder's config.json.

    Raises:
        CheckpointError: a key is missing, has no usable value, or contradicts another one.
        UnsupportedModelError: another kind of drafter; the message names it.
    """
    path = folder / "config.json"
    if (folder / "mask_embedding.pt").exists():
        raise UnsupportedModelError(f"{folder} holds mask_embedding.pt, a learned mask embedding. {SERVED}")
    return parse_drafter_config(read_json(path), str(path))


def parse_drafter_config(config: Mapping[str, Any], where: str) -> DrafterConfig:
    """Settles every fact of a drafter from its config.

    Args:
        config: Content of config.json.
        where: Its path, for messages.

    Raises:
        CheckpointError: a key is missing, has no usable value, or contradicts another one.
        UnsupportedModelError: another kind of drafter; the message names it.
    """
    layout = find_layout(config)
    unknown_keys = tuple(layout.unknown_keys(config))
    config = layout.to_zlab(config, where)
    nested = config.get("dflash_config") or {}
    if not isinstance(nested, dict):
        raise CheckpointError(f"{where}: dflash_config is {type(nested).__name__} where an object is expected.")
    architecture = refuse_other_kinds(config, nested, where)
    keys = _Keys(config, nested, where)
    notes: list[str] = []
    num_layers, hidden = keys.count("num_hidden_layers"), keys.count("hidden_size")
    heads = keys.count("num_attention_heads")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModelError(f"{where}: hidden_act is {activation!r}; DFlash drafters use silu.")
    rope = read_rope_parameters(config, where)
    head_dim = _head_dim(keys, hidden, heads)
    max_position = keys.count("max_position_embeddings", required=False)
    rope_frequencies(rope, head_dim, max_position, where)  # a broken scaling shows here, before any work
    softcap = keys.number("final_logit_softcapping", 0.0)
    return DrafterConfig(
        layout=layout.name,
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden,
        target_hidden_size=keys.count("target_hidden_size", required=False) or hidden,
        intermediate_size=keys.count("intermediate_size"),
        num_heads=heads,
        num_kv_heads=_kv_heads(keys, heads),
        head_dim=head_dim,
        vocab_size=keys.count("vocab_size", required=False),
        draft_vocab_size=_draft_vocab_size(keys),
        rms_norm_eps=keys.number("rms_norm_eps", None),
        attention_bias=bool(config.get("attention_bias", False)),
        layers=read_layer_attention(config, nested, num_layers, where),
        rope_parameters=rope,
        max_position_tokens=max_position,
        target_layer_ids=_target_layer_ids(keys, notes),
        num_target_layers=keys.count("num_target_layers", required=False),
        mask_token_id=keys.count("mask_token_id", least=0),
        block_size=_block_size(keys, notes),
        input_embedding_scale=keys.number("input_embedding_scale", 1.0),
        output_multiplier=keys.number("output_multiplier", 1.0),
        final_logit_softcapping=softcap if softcap > 0 else None,
        dflash2=_dflash2(keys, hidden) if architecture == DFLASH2_ARCHITECTURE else None,
        made_for=config.get("made_for"),
        unknown_keys=unknown_keys,
        notes=tuple(notes),
    )


class _Keys:
    """Looks keys up in `dflash_config` and at top level, and refuses two that differ."""

    def __init__(self, config: Mapping[str, Any], nested: Mapping[str, Any], where: str) -> None:
        self.config = config
        self.nested = nested
        self.where = where

    def find(self, key: str) -> Any:
        """The value, or None when neither place has it."""
        inside, outside = self.nested.get(key), self.config.get(key)
        if inside is not None and outside is not None and inside != outside:
            raise CheckpointError(
                f"{self.where} contradicts itself: {key} {outside} and dflash_config.{key} {inside}. "
                "Keep the one the drafter was trained with."
            )
        return outside if inside is None else inside

    def missing(self, key: str) -> CheckpointError:
        """The error for a key that is nowhere."""
        return CheckpointError(f"{self.where} does not state {key}. Accepted keys: dflash_config.{key}, {key}.")

    def count(self, key: str, *, required: bool = True, least: int = 1) -> Any:
        """A whole number; None when it is absent and not required."""
        value = self.find(key)
        if value is None:
            if required:
                raise self.missing(key)
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise CheckpointError(f"{self.where}: {key} is {value!r}; it must be a whole number of at least {least}.")
        return value

    def number(self, key: str, default: float | None) -> float:
        """A number; required where there is no default."""
        value = self.find(key)
        if value is None:
            if default is None:
                raise self.missing(key)
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {key} is {value!r}; it must be a number.")
        return float(value)


def _head_dim(keys: _Keys, hidden: int, heads: int) -> int:
    stated = keys.count("head_dim", required=False)
    if stated is None and hidden % heads:
        raise CheckpointError(
            f"{keys.where} states no head_dim, and hidden_size {hidden} is no multiple of num_attention_heads {heads}."
        )
    head_dim = int(stated or hidden // heads)
    if head_dim % 2:
        raise CheckpointError(f"{keys.where}: head_dim is {head_dim}; a rotary embedding needs an even one.")
    return head_dim


def _kv_heads(keys: _Keys, heads: int) -> int:
    kv_heads = int(keys.count("num_key_value_heads", required=False) or heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"{keys.where}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}."
        )
    return kv_heads


def _draft_vocab_size(keys: _Keys) -> int | None:
    rows, whole = keys.count("draft_vocab_size", required=False), keys.count("vocab_size", required=False)
    return None if rows in (None, whole) else int(rows)


def _dflash2(keys: _Keys, hidden: int) -> DFlash2Config:
    kernel, group = keys.count("conv_kernel_size"), keys.count("conv_group_size")
    if hidden % group:
        raise CheckpointError(f"{keys.where}: hidden_size {hidden} is no multiple of conv_group_size {group}.")
    if _draft_vocab_size(keys) is not None:
        raise UnsupportedModelError(
            f"{keys.where} describes a DFlash 2 drafter with a reduced vocabulary; its codebooks need the whole one."
        )
    return DFlash2Config(kernel, group, keys.count("selector_rank"), keys.count("selector_top_k"))


def _target_layer_ids(keys: _Keys, notes: list[str]) -> tuple[int, ...]:
    key, ids, shift = "target_layer_ids", keys.find("target_layer_ids"), 0
    for other in ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"):
        if ids is None and keys.find(other) is not None:
            # These count hidden states, of which the embedding output is number 0.
            key, ids, shift = other, keys.find(other), 1
            notes.append(f"{other} {ids} counts from the embedding: taps are the outputs of layers one lower")
    if ids is None:
        raise CheckpointError(
            f"{keys.where} does not state which target layers are tapped, and a guess would go unnoticed. Accepted "
            "keys: dflash_config.target_layer_ids, target_layer_ids (0-based layers), aux_hidden_state_layer_ids "
            "(those plus one)."
        )
    whole = isinstance(ids, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    if not whole or not ids or min(ids) - shift < 0 or len(set(ids)) < len(ids):
        raise CheckpointError(f"{keys.where}: {key} is {ids!r}; it must list different layers, numbered from {shift}.")
    return tuple(i - shift for i in ids)


def _block_size(keys: _Keys, notes: list[str]) -> int:
    stated = keys.count("block_size", required=False)
    if stated is None:
        notes.append(
            f"the drafter's config states no block_size (dflash_config.block_size or block_size): "
            f"{DEFAULT_BLOCK_SIZE} is used, as the authors' package does"
        )
        return DEFAULT_BLOCK_SIZE
    return int(stated)

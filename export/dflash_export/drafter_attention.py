"""Which tokens each drafter layer sees: the rules of causality and window, from the config alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dflash_runtime.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from torch import Tensor

FULL, SLIDING = "full_attention", "sliding_attention"
CAUSAL_KEYS = ("is_causal", "causal", "dflash_query_causal")


@dataclasses.dataclass(frozen=True)
class LayerAttention:
    """What one layer's block tokens see. Context rows lie before the block, so full layers see all of them."""

    causal: bool
    """A block token sees no later block token."""
    window_tokens: int | None
    """Only keys nearer than this are seen, the token itself counted; None for no limit."""

    def sees(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Boolean [..., Q, S], True where a query at one position sees a key at another.

        Args:
            query_positions: [Q] or [..., Q, 1]
            key_positions: [S] or [..., 1, S]
        """
        distance = query_positions - key_positions
        window = self.window_tokens
        if self.causal:
            return distance >= 0 if window is None else (distance >= 0) & (distance < window)
        if window is None:
            import torch  # a plan reads configs without it

            return torch.ones_like(distance, dtype=torch.bool)
        return (distance < window) & (distance > -window)


def read_layer_attention(
    config: Mapping[str, Any], nested: Mapping[str, Any], num_layers: int, where: str
) -> tuple[LayerAttention, ...]:
    """Settles causality and window of every layer.

    One setting for all layers decides causality when there is one; otherwise sliding layers are causal and full
    layers see the whole block, as the authors train them.

    Args:
        config: Content of config.json.
        nested: Its `dflash_config`, {} when absent.
        num_layers: Drafter layers.
        where: Path of the file, for messages.

    Raises:
        CheckpointError: keys that contradict each other, or a sliding layer without a window.
        UnsupportedModelError: a layer type of another kind.
    """
    types = _layer_types(config, num_layers, where)
    window = _window(config, nested, where)
    sliding = [kind == SLIDING for kind in types]
    use_swa = bool(nested.get("use_swa", config.get("use_swa", False)))
    if any(sliding) and config.get("use_sliding_window") is False and not use_swa:
        raise CheckpointError(
            f"{where}: layer_types names sliding layers and use_sliding_window is false. Correct the one that is wrong."
        )
    causal = _causal_for_all(config, nested, where)
    causals = sliding if causal is None else [causal] * num_layers
    if use_swa and not any(sliding):
        sliding = [True] * num_layers
    if any(sliding) and window is None:
        raise CheckpointError(
            f"{where} has sliding layers and no window. Accepted keys: dflash_config.swa_window_size, sliding_window."
        )
    return tuple(LayerAttention(causals[i], window if sliding[i] else None) for i in range(num_layers))


def _layer_types(config: Mapping[str, Any], num_layers: int, where: str) -> list[str]:
    types = config.get("layer_types")
    if types is None:
        # Transformers gives Qwen3-shaped configs sliding layers from max_window_layers on.
        first = config.get("max_window_layers", 28)
        slides = config.get("use_sliding_window") is True and config.get("sliding_window") is not None
        return [SLIDING if slides and i >= first else FULL for i in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers:
        raise CheckpointError(
            f"{where}: layer_types has {len(types) if isinstance(types, list) else types!r} entries and "
            f"num_hidden_layers is {num_layers}."
        )
    other = sorted({str(kind) for kind in types} - {FULL, SLIDING})
    if other:
        raise UnsupportedModelError(
            f"{where} has layers of type {', '.join(other)}; a DFlash drafter has {FULL} and {SLIDING} layers."
        )
    return [str(kind) for kind in types]


def _window(config: Mapping[str, Any], nested: Mapping[str, Any], where: str) -> int | None:
    found = nested.get("swa_window_size")
    window = config.get("sliding_window") if found is None else found
    if window is None:
        return None
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise CheckpointError(f"{where}: the sliding window is {window!r}; it must be a number of tokens.")
    return window


def _causal_for_all(config: Mapping[str, Any], nested: Mapping[str, Any], where: str) -> bool | None:
    places = (("", config), ("dflash_config.", nested))
    found = {
        f"{prefix}{key}": place[key] for prefix, place in places for key in CAUSAL_KEYS if place.get(key) is not None
    }
    if not found:
        return None
    if len({bool(value) for value in found.values()}) > 1:
        listed = " and ".join(f"{key} {value}" for key, value in found.items())
        raise CheckpointError(f"{where} contradicts itself: {listed}. Keep the one the drafter was trained with.")
    return bool(next(iter(found.values())))

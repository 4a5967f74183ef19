"""What replaces Transformers' attention, masks and cache while a model is traced.

Transformers lets a caller register an attention function, a mask function and pass its own cache object.
Through these three doors every model's attention becomes the same few standard ONNX nodes:
TensorScatter writes the new rows into the preallocated cache, Attention reads it up to its valid length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer

from dflash_export.sink_attention import attend_with_sinks
from dflash_runtime.errors import UnsupportedModelError

# The name must not contain "flash": Transformers would look for a flash-attention kernel behind it.
ATTENTION_NAME = "bundle_trace"
ONNX_OPSET = 24

# What models pass along that does not change the result of attention once the mask is made.
_IGNORED_ATTENTION_ARGUMENTS = frozenset(
    [
        "cache", "cache_position", "deterministic", "enable_gqa", "head_mask", "is_causal", "is_decoder",
        "layer_idx", "logits_to_keep", "num_items_in_batch", "output_attentions", "output_hidden_states",
        "output_router_logits", "past_key_values", "position_embeddings", "position_ids", "rotary_pos_emb",
        "s_aux", "target_dtype", "training", "use_cache", "window_size"
    ]
)  # fmt: skip


@dataclasses.dataclass
class LayerState:
    """What one layer's attention and cache looked like in a forward pass."""

    key_shape: tuple[int, int] | None = None
    """(kv_heads, head_dim) of the keys."""
    value_shape: tuple[int, int] | None = None
    attention_calls: int = 0
    window_tokens: int | None = None
    masked: bool = False


@dataclasses.dataclass
class TraceState:
    """Everything the hooks share in one forward pass."""

    position: Tensor
    """[B] rows already committed."""
    layers: list[LayerState]
    masks: dict[int, int | None] = dataclasses.field(default_factory=dict)
    """id of a mask made here -> its window in tokens, None for any other pattern."""
    keep_alive: list[Tensor] = dataclasses.field(default_factory=list)
    buffers: set[int] = dataclasses.field(default_factory=set)
    """ids of the caches as this pass wrote them."""


_active: list[TraceState] = []


@contextmanager
def tracing(state: TraceState) -> Iterator[TraceState]:
    """Makes `state` the one the hooks write to."""
    _active.append(state)
    try:
        yield state
    finally:
        _active.pop()


def symbolic(op: str, inputs: list[Tensor | None], attributes: dict[str, Any], like: Tensor, shape: Any,
             metadata: dict[str, str] | None = None) -> Tensor:
    """One standard ONNX node in the traced graph, with the dtype of `like` and the given output shape."""
    return torch.onnx.ops.symbolic(
        op, inputs, attributes, dtype=like.dtype, shape=shape, version=ONNX_OPSET, metadata_props=metadata
    )


def scatter_rows(past: Tensor, rows: Tensor, position: Tensor) -> Tensor:
    """Writes rows [B, heads, S, D] at `position` [B] of a cache [B, heads, T, D] (ONNX TensorScatter-24)."""
    return symbolic("TensorScatter", [past, rows, position], {"axis": 2, "mode": "linear"}, past, past.shape)


def attend(query: Tensor, key: Tensor, value: Tensor, *, length: Tensor, scale: float, layer: int,
           mask: Tensor | None, causal: bool, window_tokens: int | None, softcap: float = 0.0,
           derived: bool = False) -> Tensor:
    """ONNX Attention-24 over a preallocated cache.

    Args:
        query: [B, heads, S, D]
        key: [B, kv_heads, T, D], rows at and past `length` are not read.
        value: [B, kv_heads, T, Dv]
        length: [B] valid rows, the new ones included.
        scale: Factor of the scores.
        layer: Layer number, kept as node metadata for the lowering passes.
        mask: Boolean [1, 1, S, T], True where the key is seen; or additive; None for none.
        causal: The pattern is causal; without a mask the node's own causal rule is used.
        window_tokens: The pattern's window, for the lowering passes.
        softcap: Logit soft cap of the scores, 0 for none.
        derived: Keys or values are computed from the cache, not the cache itself: lowering leaves the node alone.

    Returns:
        [B, heads, S, Dv]
    """
    B, heads, S, _ = query.shape
    attributes: dict[str, Any] = {"scale": float(scale)}
    if mask is None and causal:
        attributes["is_causal"] = 1
    if softcap:
        attributes["softcap"] = float(softcap)
    metadata = {
        "dflash.layer": str(layer),
        "dflash.causal": "1" if causal else "0",
        "dflash.window": "" if window_tokens is None else str(window_tokens),
    }
    if derived:
        metadata["dflash.derived"] = "1"
    shape = (B, heads, S, value.shape[-1])
    return symbolic("Attention", [query, key, value, mask, None, None, length], attributes, query, shape, metadata)


class RowsCache(Cache):  # type: ignore[misc]
    """A cache whose layers are fixed buffers; new rows are scattered at the committed length."""

    def __init__(self, past: list[tuple[Tensor, Tensor]] | None, state: TraceState) -> None:
        super().__init__(layers=[DynamicLayer() for _ in state.layers])
        self.past = past
        self.state = state
        self.present: list[tuple[Tensor, Tensor] | None] = [None] * len(state.layers)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
               ) -> tuple[Tensor, Tensor]:
        """Scatters the new rows and returns the whole buffers; without buffers it only records shapes."""
        layer = self.state.layers[layer_idx]
        if layer.key_shape is not None and self.present[layer_idx] is not None:
            raise UnsupportedModelError(f"layer {layer_idx} asks twice in one pass to write its KV cache")
        layer.key_shape = (int(key_states.shape[1]), int(key_states.shape[3]))
        layer.value_shape = (int(value_states.shape[1]), int(value_states.shape[3]))
        if self.past is None:
            self.present[layer_idx] = (key_states, value_states)
        else:
            key, value = self.past[layer_idx]
            position = self.state.position
            self.present[layer_idx] = (
                scatter_rows(key, key_states, position),
                scatter_rows(value, value_states, position),
            )
        present = self.present[layer_idx]
        assert present is not None
        self.state.buffers |= {id(rows) for rows in present}
        return present

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """The committed length, as a traced scalar."""
        return self.state.position[0]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[Any, int]:
        """Masks span the whole capacity; without buffers, the tokens of this pass."""
        return (query_length if self.past is None else self.past[layer_idx][0].shape[2]), 0


def _attention(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
               scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
               softcap: float | None = None, **kwargs: Any) -> tuple[Tensor, None]:
    state = _active[-1]
    layer_id = getattr(module, "layer_idx", None)
    if not isinstance(layer_id, int) or layer_id >= len(state.layers):
        raise UnsupportedModelError(f"attention of {type(module).__name__} does not say its layer number")
    _refuse_unknown_arguments(module, kwargs)
    layer = state.layers[layer_id]
    layer.attention_calls += 1
    window = None
    if attention_mask is not None:
        window = state.masks.get(id(attention_mask))
        layer.masked = True
    layer.window_tokens = window
    causal = attention_mask is None or window is not None
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    length = state.position + query.shape[2]
    sinks = kwargs.get("s_aux")
    if sinks is not None:
        if softcap:
            raise UnsupportedModelError(f"{type(module).__name__} has both attention sinks and a soft cap")
        output = attend_with_sinks(
            query, key, value, sinks, position=state.position, scale=scale, mask=attention_mask
        )
    else:
        output = attend(
            query, key, value, length=length, scale=scale, layer=layer_id, mask=attention_mask, causal=causal,
            window_tokens=window, softcap=softcap or 0.0,
            derived=not {id(key), id(value)} <= state.buffers,
        )
    return output.transpose(1, 2).contiguous(), None


def _refuse_unknown_arguments(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    name = type(module).__name__
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError("its attention is not causal")
    unknown = sorted(
        key for key, value in kwargs.items() if value is not None and key not in _IGNORED_ATTENTION_ARGUMENTS
    )
    if unknown:
        raise UnsupportedModelError(f"{name} passes attention arguments this exporter does not know: {unknown}")


def _mask(batch_size: int, q_length: Any, kv_length: Any, q_offset: Any = 0, kv_offset: Any = 0,
          mask_function: Callable[..., Tensor] | None = None, attention_mask: Tensor | None = None,
          **kwargs: Any) -> Tensor | None:
    """Makes the model's own mask pattern over the capacity; a plain causal one needs no mask at all."""
    state = _active[-1]
    assert mask_function is not None
    parts = _parts(mask_function)
    if parts == {"causal_mask_function"} and kwargs.get("allow_is_causal_skip", True):
        return None
    rows = (state.position[:, None] + torch.arange(q_length)[None, :])[:, None, :, None]
    keys = torch.arange(kv_length)[None, None, None, :]
    zero = torch.zeros(1, dtype=torch.long)
    mask = mask_function(zero[:, None, None, None], zero[None, :, None, None], rows, keys)
    window = kwargs.get("local_size")
    sliding = parts == {"causal_mask_function", "sliding_window_overlay"} and isinstance(window, int)
    state.masks[id(mask)] = window if sliding else None
    state.keep_alive.append(mask)  # an id is only unique while its object lives
    return mask


def _parts(function: Callable[..., Tensor]) -> set[str]:
    """Names of the elementary mask functions a combined one is made of."""
    name = function.__qualname__.split(".<locals>")[0]
    if name in ("and_masks", "or_masks"):
        parts = {name} if name == "or_masks" else set()
        for cell in function.__closure__ or ():
            if isinstance(cell.cell_contents, tuple):
                for part in cell.cell_contents:
                    parts |= _parts(part)
        return parts
    return {name}


AttentionInterface.register(ATTENTION_NAME, _attention)
AttentionMaskInterface.register(ATTENTION_NAME, _mask)

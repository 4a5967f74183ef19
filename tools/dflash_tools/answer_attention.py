"""Attention over a preallocated cache in which every row of the batch has a length of its own.

Transformers lets a caller register an attention function and a mask function, and pass a cache object. Through these
three doors any causal model decodes rows that started at different times: nothing is padded and nothing is copied.

Letters: B rows in this call, S new tokens of each, T capacity, L columns looked at, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer

from dflash_runtime.errors import UnsupportedModelError

ATTENTION_NAME = "rows_of_their_own_length"
_UNKNOWN = ("s_aux", "head_mask")
_active: list[RowsCache] = []


class RowsCache(Cache):  # type: ignore[misc]
    """Keys and values of all rows; a call names its rows and where their new tokens go.

    Attributes:
        rows: The rows of this call, as a slice of the batch.
        positions: [B, S] columns of the new tokens.
        columns: L, the columns this call looks at.
        attention_calls: Layers whose attention came through here in this call.
    """

    def __init__(self, num_layers: int, num_rows: int, capacity: int) -> None:
        super().__init__(layers=[DynamicLayer() for _ in range(num_layers)])
        self._shape = (num_rows, capacity)
        self._buffers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers
        self.rows, self.columns = slice(0, 0), 0
        self.positions = torch.empty(0, 0, dtype=torch.long)
        self.attention_calls = 0

    def begin(self, rows: slice, positions: Tensor) -> None:
        """The next call's rows and positions; they are the cache that attention reads."""
        self.rows, self.positions, self.attention_calls = rows, positions, 0
        self.columns = int(positions.max()) + 1
        _active[:] = [self]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes new rows [B, kv_heads, S, D] and returns the columns looked at, [B, kv_heads, L, D]."""
        found = self._buffers[layer_idx]
        if found is None:
            rows, capacity = self._shape
            found = (
                key_states.new_zeros(rows, key_states.shape[1], capacity, key_states.shape[3]),
                value_states.new_zeros(rows, value_states.shape[1], capacity, value_states.shape[3]),
            )
            self._buffers[layer_idx] = found
        numbers = torch.arange(self.rows.start, self.rows.stop, device=key_states.device)[:, None]
        found[0][numbers, :, self.positions] = key_states.transpose(1, 2)
        found[1][numbers, :, self.positions] = value_states.transpose(1, 2)
        return found[0][self.rows, :, : self.columns], found[1][self.rows, :, : self.columns]

    def move_row(self, source: int, destination: int, length: int) -> None:
        """Puts one row's columns in the place of another's."""
        for buffer in self._buffers:
            if buffer is not None:
                for part in buffer:
                    part[destination, :, :length] = part[source, :, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns before the new tokens, were the rows equally long."""
        return self.columns - int(self.positions.shape[1])

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Masks span the columns looked at."""
        return self.columns, 0


def _attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, softcap: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    unknown = [name for name in _UNKNOWN if kwargs.get(name) is not None]
    if unknown:
        raise UnsupportedModelError(
            f"{type(module).__name__} needs attention arguments that batched answers do not know: {unknown}. "
            "Answers from another program can be given to train-drafter."
        )
    _active[-1].attention_calls += 1
    B, heads, S, D = query.shape
    kv_heads, L = key.shape[1:3]
    groups = heads // kv_heads
    # The queries of one group of heads as rows of one product: no key is copied for its other heads.
    grouped = query.reshape(B, kv_heads, groups * S, D)
    seen = None if attention_mask is None else attention_mask.expand(B, 1, S, L).repeat(1, 1, groups, 1)
    scale = D**-0.5 if scaling is None else scaling
    if softcap:
        output = _capped_attention(grouped, key, value, seen, scale, softcap)
    else:
        output = functional.scaled_dot_product_attention(grouped, key, value, seen, scale=scale)
    return output.view(B, heads, S, -1).transpose(1, 2).contiguous(), None


def _capped_attention(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, scale: float, softcap: float
) -> Tensor:
    scores = torch.tanh((query @ key.transpose(2, 3)).float() * (scale / softcap)) * softcap
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1).to(value.dtype) @ value


def _mask(
    batch_size: int, q_length: int, kv_length: int, *args: Any, mask_function: Callable[..., Tensor], **kwargs: Any
) -> Tensor:
    """[B, 1, S, L] the model's own pattern, with every row's queries at that row's own positions."""
    cache = _active[-1]
    device = cache.positions.device
    batch = torch.arange(batch_size, device=device)[:, None, None, None]
    head = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
    keys = torch.arange(kv_length, device=device)[None, None, None]
    return mask_function(batch, head, cache.positions[:, None, :, None], keys)


AttentionInterface.register(ATTENTION_NAME, _attention)
AttentionMaskInterface.register(ATTENTION_NAME, _mask)

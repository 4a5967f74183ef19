"""Bytes a session keeps for weights and caches, from the bundle's facts: exact for what is stored, no measurement."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from dflash_runtime.bundle import Bundle, StateTensor
from dflash_tools.plan_formulas import capacity_tokens
from dflash_tools.weight_bytes import ITEM_BYTES

_FLOATS = {"F32", "F16", "BF16"}
"""Of a dtype that is not widened; the rest take one byte."""


@dataclasses.dataclass(frozen=True)
class SessionMemory:
    """What a session keeps."""

    weight_bytes: int
    """Target and drafter, shared tensors once, in the precision that is executed."""
    kv_bytes: int
    """Caches of target and drafter at full capacity."""


def session_memory(bundle: Bundle, precision: str, ring_rows: Mapping[str, int]) -> SessionMemory:
    """Bytes of weights and caches of a session.

    Args:
        bundle: What it runs.
        precision: What its engine executes in.
        ring_rows: Rows of the drafter's caches that are not as long as the context, by name.
    """
    manifest, item = bundle.manifest, ITEM_BYTES[precision]
    weights = sum(
        math.prod(entry.shape) * item if entry.dtype in _FLOATS else entry.length_bytes
        for entry in manifest.weights.values()
    )
    capacity = capacity_tokens(manifest.max_context_tokens, manifest.block_sizes)
    kv = sum(_elements(tensor, capacity) for tensor in manifest.target.graph.state)
    for tensor in [] if manifest.drafter is None else manifest.drafter.context_graph.state:
        kv += _elements(tensor, ring_rows.get(tensor.input, capacity))
    return SessionMemory(weights, kv * item)


def _elements(tensor: StateTensor, capacity: int) -> int:
    return math.prod({"B": 1, "T": capacity}[d] if isinstance(d, str) else d for d in tensor.shape)

"""The sizes a call of each graph may have on a device: one for each block size, for prefill and for plain steps."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_engines.acceptance_graph import ACCEPTANCE
from dflash_engines.candidates_graph import CANDIDATES
from dflash_runtime.device_engine import EngineProfile


def call_profiles(kind: str, block_sizes: Sequence[int], chunk: int, capacities: Sequence[int]) -> list[EngineProfile]:
    """Profiles of a graph, smallest first: of those that cover a call, the first is the one to use.

    Args:
        kind: Which graph: a drafter has no prefill and no plain steps, acceptance and
            candidates no prefill and no caches.
        block_sizes: Without 1; empty where there is no drafter.
        chunk: Most prompt tokens of a call.
        capacities: Rows of cache a call may read.
    """
    sizes = set(block_sizes) if kind == "drafter" else {1, *block_sizes}
    sizes |= {chunk} if kind in ("target", "drafter_context") else set()
    scored = kind in ("target", CANDIDATES)
    logit_rows = {n: 0 if not scored else n if n in block_sizes else 1 for n in sizes}
    return [EngineProfile(n, logit_rows[n], rows) for n in sorted(sizes)
            for rows in ([0] if kind in (ACCEPTANCE, CANDIDATES) else capacities)]  # fmt: skip

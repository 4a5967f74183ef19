"""Something that runs a pair's graphs and shows every tensor it hands out: PyTorch, portable graphs, or engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np

from dflash_runtime.bundle import Manifest
from dflash_runtime.errors import BackendError
from dflash_tools.reference_tensors import Array, Tensors


class GraphProbe(Protocol):
    """Target and drafter with their caches. Every tensor is given by rows, in the order of computation.

    `position` is the number of rows before the call; rows at and past it are dead and are replaced.
    """

    name: str
    """What it is, for people."""
    precision: str
    """fp32, fp16 or bf16: what it computes in."""

    shows_block_rows: bool
    """Whether the drafter's own key and value rows of a block are handed out."""

    def can_draft(self, size: int) -> bool:
        """Whether it drafts blocks of this size as such, and not as a larger block that is cut."""

    def reset(self) -> None:
        """Empty caches."""

    def target(self, ids: Sequence[int], position: int) -> Tensors:
        """One pass over the target: logits, token ids, taps, the new rows of every cache; inner tensors if it can."""

    def context(self, taps: Array, position: int) -> Tensors:
        """Appends rows of taps [R, K*H] to the drafter's context; gives the new rows of its caches."""

    def draft(self, ids: Sequence[int], position: int) -> Tensors:
        """One draft from anchor and mask ids: draft logits [b-1, V], draft ids, the block's own cache rows."""

    def cache_rows(self, model: str) -> Tensors:
        """The rows of the caches of `target` or `drafter` from the first to the last that was written, by name."""


def joined_taps(tensors: Tensors) -> Array:
    """The taps [R, K*H] of a target pass, as a drafter's context takes them."""
    count = sum(name.startswith("taps.") for name in tensors)
    pieces = [tensors[f"taps.{k}"] for k in range(count)]
    return np.concatenate(pieces, axis=-1)


class ProbeBackend:
    """A probe as a backend of the runtime: its decode loop then runs on caches that can be looked at."""

    def __init__(self, probe: GraphProbe, manifest: Manifest, prefill_chunk_tokens: int) -> None:
        self.probe, self.name, self.prefill_chunk_tokens = probe, probe.name, prefill_chunk_tokens
        self._mask_token_id = None if manifest.drafter is None else manifest.drafter.mask_token_id
        self._taps: Array | None = None
        self._logits: Array | None = None
        self._drafted: Tensors = {}

    def reset(self, kept_rows: int = 0) -> int:
        """See `Backend.reset`: nothing is kept, every request is computed whole."""
        self.probe.reset()
        return 0

    def prefill(self, ids: Sequence[int], position: int) -> int:
        """See `Backend.prefill`."""
        return self._target(ids, position)[-1]

    def verify(self, block: Sequence[int], position: int) -> list[int]:
        """See `Backend.verify`."""
        return self._target(block, position)

    def draft(self, anchor: int, block_size: int, position: int) -> list[int]:
        """See `Backend.draft`."""
        if self._mask_token_id is None:
            raise BackendError("The bundle has no drafter, so nothing can be drafted. Use block size 1.")
        block = [anchor, *[self._mask_token_id] * (block_size - 1)]
        self._drafted = self.probe.draft(block, position)
        return [int(token) for token in self._drafted["draft_ids"][:, 0]]

    def outputs(self, kind: Literal["target", "drafter"], rows: int) -> dict[str, Array]:
        """See `Backend.outputs`."""
        if kind == "drafter":
            return {name: array[:rows] for name, array in self._drafted.items()}
        assert self._logits is not None, "nothing was scored yet"
        return {"logits": self._logits[-rows:]}

    def append_context(self, rows: int, position: int) -> None:
        """See `Backend.append_context`."""
        if self._mask_token_id is not None and self._taps is not None:
            self.probe.context(self._taps[:rows], position)

    def cache_rows(self, model: str) -> Tensors:
        """See `GraphProbe.cache_rows`."""
        return self.probe.cache_rows(model)

    def close(self) -> None:
        """Nothing to free: a probe is plain memory."""

    def _target(self, ids: Sequence[int], position: int) -> list[int]:
        found = self.probe.target(ids, position)
        self._taps, self._logits = joined_taps(found), found["logits"]
        return [int(token) for token in found["token_ids"][:, 0]]

"""Acceptance by script: the drafter does its work, then its proposals are replaced so that a wanted number is accepted.

For measuring the speed of a pair whose drafter is not trained, and of two engines at the same acceptance. Never more
than a measurement: the script has to know the answer. It cannot measure a backend that drafts and accepts without
the host, because nothing stands between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy.typing as npt

from dflash_runtime.backend import Backend

SCRIPTABLE_BACKENDS = ("ort-cpu",)
"""Backends whose proposals pass through the host."""


class AcceptanceScript:
    """Proposals for one request of which all but the last of `tokens_per_round` tokens are right."""

    def __init__(self, prompt_tokens: int, answer: Sequence[int], tokens_per_round: int, vocab_size: int) -> None:
        """Of a request whose answer is known.

        Args:
            prompt_tokens: Length of the prompt.
            answer: The target's own answer to it.
            tokens_per_round: Tokens each round is to commit, the target's own included; at least 1.
            vocab_size: For a token that is wrong for certain.
        """
        self._prompt_tokens = prompt_tokens
        self._answer = list(answer)
        self._tokens_per_round = tokens_per_round
        self._vocab_size = vocab_size

    def proposals(self, drafted: Sequence[int], position: int) -> list[int]:
        """What to propose after the anchor at `position` instead of what was drafted; as many tokens."""
        first = position + 1 - self._prompt_tokens  # place in the answer of the first proposal
        true = self._answer[first : first + len(drafted)]
        right = true[: self._tokens_per_round - 1]
        proposals = [*right, *drafted[len(right) :]]
        wrong = len(right)
        if wrong < len(true) and proposals[wrong] == true[wrong]:
            proposals[wrong] = (true[wrong] + 1) % self._vocab_size
        return proposals


class ScriptedBackend:
    """Passes every call on; what is drafted is replaced while a script is set."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.name = backend.name
        self.prefill_chunk_tokens = backend.prefill_chunk_tokens
        self.script: AcceptanceScript | None = None

    def reset(self, kept_rows: int = 0) -> int:
        """See `Backend.reset`."""
        return self._backend.reset(kept_rows)

    def prefill(self, ids: Sequence[int], position: int) -> int:
        """See `Backend.prefill`."""
        return self._backend.prefill(ids, position)

    def draft(self, anchor: int, block_size: int, position: int) -> list[int]:
        """See `Backend.draft`: the drafter runs all the same, for its time."""
        drafted = self._backend.draft(anchor, block_size, position)
        return drafted if self.script is None else self.script.proposals(drafted, position)

    def verify(self, block: Sequence[int], position: int) -> list[int]:
        """See `Backend.verify`."""
        return self._backend.verify(block, position)

    def outputs(self, kind: Literal["target", "drafter"], rows: int) -> dict[str, npt.NDArray[Any]]:
        """See `Backend.outputs`."""
        return self._backend.outputs(kind, rows)

    def append_context(self, rows: int, position: int) -> None:
        """See `Backend.append_context`."""
        self._backend.append_context(rows, position)

    def close(self) -> None:
        """See `Backend.close`."""
        self._backend.close()

"""The decode loop: prefill, then rounds of draft, verify, accept, commit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from typing import NamedTuple

from dflash_runtime.backend import Backend
from dflash_runtime.errors import NumericsError


class Round(NamedTuple):
    """What one pass over the target committed."""

    committed: list[int]
    """Tokens that now belong to the output, oldest first."""
    proposed: list[int]
    """What the drafter proposed for them; empty for the prefill and for plain steps."""
    finish_reason: str | None
    """`stop`, `length` or `context` in the last round, else None."""


def accept(proposed: Sequence[int], posterior: Sequence[int]) -> list[int]:
    """The greedy rule: keep proposals while they are what the target says, then add the target's own token.

    `proposed` are the b-1 drafted tokens, `posterior` is the target's choice after each of the b block tokens.
    """
    accepted = 0
    while accepted < len(proposed) and proposed[accepted] == posterior[accepted]:
        accepted += 1
    return list(posterior[: accepted + 1])


def decode(
    backend: Backend, prompt: Sequence[int], *, max_new_tokens: int, max_context_tokens: int,
    stop_token_ids: Collection[int], block_size_of: Callable[[int], int],
) -> Generator[Round, None, None]:
    """Greedy decoding; the words are those of plain decoding whatever is proposed.

    Args:
        backend: Holds the models' state; any earlier request in it is forgotten.
        prompt: At least one and at most `max_context_tokens` ids.
        max_new_tokens: Budget, at least 1.
        max_context_tokens: Most rows in the KV cache. One more token may exist: the newest needs no row.
        stop_token_ids: Ids that end the output; the first one met is its last token.
        block_size_of: Block size, anchor included, for the n-th round; 1 is a plain step.

    Raises:
        NumericsError: the target's logits were not finite where a token had to be chosen.
    """
    end = min(len(prompt) + max_new_tokens, max_context_tokens + 1)  # most tokens, prompt included
    backend.reset()
    position = 0  # rows committed, in target and drafter alike; also the place of the newest token
    for start in range(0, len(prompt), backend.prefill_chunk_tokens):
        chunk = prompt[start : start + backend.prefill_chunk_tokens]
        token = backend.prefill(chunk, start)
        backend.append_context(len(chunk), start)
        position += len(chunk)
    committed, number = [token], 0
    proposed: list[int] = []
    while True:
        if -1 in committed:
            place = position + 1 - len(committed) + committed.index(-1)
            raise NumericsError(
                f"The target's logits for position {place} are NaN or infinite, so no token can be chosen. "
                "Build the bundle in a wider precision: --precision bf16 or fp32."
            )
        full = "length" if end == len(prompt) + max_new_tokens else "context"
        reason = "stop" if committed[-1] in stop_token_ids else full if position + 1 == end else None
        yield Round(committed, proposed, reason)
        if reason is not None:
            return
        anchor = committed[-1]
        block = min(block_size_of(number), end - position)
        proposed = backend.draft(anchor, block, position) if block > 1 else []
        posterior = backend.verify([anchor, *proposed], position)
        committed = _cut(accept(proposed, posterior), end - position - 1, stop_token_ids)
        # All `block` rows are written; the next round begins where the rejected ones do and replaces them.
        backend.append_context(block, position)
        position += len(committed)
        number += 1


def _cut(tokens: list[int], room: int, stop_token_ids: Collection[int]) -> list[int]:
    stop = next((i for i, token in enumerate(tokens) if token in stop_token_ids), len(tokens))
    return tokens[: min(room, stop + 1)]

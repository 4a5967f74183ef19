"""The decode loop: prefill, then cycles of draft, verify, accept, commit; and the cycles as the host runs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from typing import TYPE_CHECKING

from dflash_runtime.backend import Backend, Cycles, Round
from dflash_runtime.errors import NumericsError

if TYPE_CHECKING:
    from dflash_runtime.sampling import TokenChooser


def decode(
    backend: Backend, prompt: Sequence[int], *, max_new_tokens: int, max_context_tokens: int,
    stop_token_ids: Collection[int], block_size_of: Callable[[int], int], chooser: TokenChooser | None = None,
    kept_rows: int = 0, read: Callable[[int], None] = lambda rows: None,
) -> Generator[Round, None, None]:
    """Decoding, greedy without a chooser; the words are those of plain decoding whatever is proposed.

    Args:
        backend: Holds the models' state; of the request before nothing is used but the kept rows.
        prompt: At least one and at most `max_context_tokens` ids.
        max_new_tokens: Budget, at least 1.
        max_context_tokens: Most rows in the KV cache. One more token may exist: the newest needs no row.
        stop_token_ids: Ids that end the output; the first one met is its last token.
        block_size_of: Block size, anchor included, for the n-th round; 1 is a plain step.
        chooser: Chooses tokens by the target's logits; None takes the likeliest.
        kept_rows: First tokens of the prompt whose rows both models have from the request before; not all of them.
        read: Told after every piece of the prompt how many tokens both models have; what it raises ends the request.

    Raises:
        NumericsError: the target's logits were not finite where a token had to be chosen.
    """
    end = min(len(prompt) + max_new_tokens, max_context_tokens + 1)  # most tokens, prompt included
    kept = position = backend.reset(kept_rows)  # rows committed, in both models; also the place of the newest token
    for start in range(kept, len(prompt), backend.prefill_chunk_tokens):
        chunk = prompt[start : start + backend.prefill_chunk_tokens]
        token = backend.prefill(chunk, start)
        backend.append_context(len(chunk), start)
        position += len(chunk)
        read(position)
    if chooser is not None:
        (token,) = chooser.decide(backend, 1, [], position)
    cycles: Cycles = backend if chooser is None and isinstance(backend, Cycles) else HostCycles(backend, chooser)
    cycles.start_cycles(token, position, end, stop_token_ids)
    done, number, size = Round([token], [], kept_rows=kept), 0, 0
    blocks = deque[int]()  # of the cycles that are enqueued and not read
    while True:
        committed = done.committed
        if -1 in committed:
            place = position + 1 - len(committed) + committed.index(-1)
            raise NumericsError(f"The target's logits for position {place} are NaN or infinite: no token to choose. "
                                "Build the bundle in a wider precision: --precision bf16 or fp32.")  # fmt: skip
        full = "length" if end == len(prompt) + max_new_tokens else "context"
        reason = "stop" if committed[-1] in stop_token_ids else full if position + 1 == end else None
        yield done._replace(finish_reason=reason)
        if reason is not None:
            return
        # A device is given the next cycle before the one that runs is read. Near the end it waits: only a block that
        # fits whatever is accepted until then is sure to be the one that the host would choose if it looked first.
        while len(blocks) <= cycles.cycles_ahead and (room := end - position - sum(blocks)) > 1:
            size = size or block_size_of(number)
            if blocks and size > room:
                break
            blocks.append(min(size, room))
            cycles.enqueue_cycle(blocks[-1])
            size, number = 0, number + 1
        blocks.popleft()
        done = cycles.read_cycle()
        position += len(done.committed)


class HostCycles:
    """Cycles whose state the host keeps; each is run when it is read. With a chooser it says what the target says."""

    cycles_ahead = 0

    def __init__(self, backend: Backend, chooser: TokenChooser | None = None) -> None:
        self._backend, self._chooser = backend, chooser

    def start_cycles(self, anchor: int, position: int, limit: int, stop_ids: Collection[int]) -> None:
        """See `Cycles`."""
        self._anchor, self._position, self._limit, self._stop_ids = anchor, position, limit, stop_ids
        if self._chooser is not None:
            self._chooser.commit([anchor])

    def enqueue_cycle(self, block_size: int) -> None:
        """See `Cycles`."""
        self._block_size = block_size

    def read_cycle(self) -> Round:
        """See `Cycles`."""
        backend, block_size, position = self._backend, self._block_size, self._position
        proposed = backend.draft(self._anchor, block_size, position) if block_size > 1 else []
        if self._chooser is not None:
            proposed = self._chooser.propose(backend, proposed, position + 1)
        block = [self._anchor, *proposed]
        posterior = backend.verify(block, position)
        if self._chooser is not None:
            posterior = self._chooser.decide(backend, len(block), proposed, position + 1)
        committed = cut(accept(proposed, posterior), self._limit - position - 1, self._stop_ids)
        # All rows of the block are written; the next cycle begins where the rejected ones do and replaces them.
        backend.append_context(len(block), position)
        if self._chooser is not None:
            self._chooser.commit(committed)
        self._anchor, self._position = committed[-1], position + len(committed)
        return Round(committed, proposed)


def accept(proposed: Sequence[int], posterior: Sequence[int]) -> list[int]:
    """The greedy rule: keep proposals while they are what the target says, then add the target's own token.

    `proposed` are the b-1 drafted tokens, `posterior` is the target's choice after each of the b block tokens.
    """
    accepted = next((i for i, token in enumerate(proposed) if token != posterior[i]), len(proposed))
    return list(posterior[: accepted + 1])


def cut(tokens: list[int], room: int, stop_ids: Collection[int]) -> list[int]:
    """Tokens up to the first stop token, and no more than there is room for."""
    stop = next((i for i, token in enumerate(tokens) if token in stop_ids), len(tokens))
    return tokens[: min(room, stop + 1)]

"""The decode loop: prefill, then cycles of draft, verify, accept, commit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from typing import TYPE_CHECKING

from dflash_runtime.backend import Backend
from dflash_runtime.cycles import Cycles, HostCycles, Round
from dflash_runtime.errors import NumericsError

if TYPE_CHECKING:
    from dflash_runtime.sampling import TokenChooser


def decode(
    backend: Backend, prompt: Sequence[int], *, max_new_tokens: int, max_context_tokens: int,
    stop_token_ids: Collection[int], block_size_of: Callable[[int], int], chooser: TokenChooser | None = None,
    kept_rows: int = 0,
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
            raise NumericsError(
                f"The target's logits for position {place} are NaN or infinite, so no token can be chosen. "
                "Build the bundle in a wider precision: --precision bf16 or fp32."
            )
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

"""Which calls a reference is made of: each would show a wrong mask, position, window, rollback or cache row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dflash_tools.graph_probe import GraphProbe
from dflash_tools.reference_record import CONTEXT, DRAFTER, TARGET, Call
from dflash_tools.reference_tensors import Array, Tensors


def target_calls(text: int, first_sequence: int, prompt: Sequence[int], whole: Sequence[int], vocab_size: int
                 ) -> Iterator[Call]:
    """Calls of the target for one text: all of it at once, then a prefill, blocks with rollback, single tokens.

    Args:
        text: Its index.
        first_sequence: Number of the first sequence; the second is the next one.
        prompt: Its ids, [n].
        whole: Prompt and continuation.
        vocab_size: Wrong proposals are drawn from it.
    """
    n = len(prompt)
    yield Call(TARGET, first_sequence, text, 0, list(whole), len(whole), 0, f"all {len(whole)} tokens at once")
    sequence, cut = first_sequence + 1, (n + 1) // 2
    steps = [(0, cut, "first piece of the prefill"), (cut, n - cut, "rest of the prefill")]
    steps += [(n, 4, "block on a filled cache"), (n + 1, 4, "block after a rollback"), (n + 5, 1, "one token")]
    steps += [(n + 4, 8, "longer block after a rollback"), (n + 12, 1, "one token")]
    for start, rows, words in steps:
        count = min(rows, len(whole) - start)
        if count < 1:
            continue
        ids = list(whole[start : start + count])
        if words == "block on a filled cache":  # as a rejected draft: the next call takes these rows back
            ids = [ids[0], *((token * 7919 + 31 * start + i) % vocab_size for i, token in enumerate(ids[1:]))]
        yield Call(TARGET, sequence, text, start, ids, count, 0, f"{words}, {count} rows at {start}")


def drafter_calls(
    text: int, first_sequence: int, prompt: Sequence[int], whole: Sequence[int], block_sizes: Sequence[int], mask: int
) -> Iterator[Call]:
    """Calls of the drafter's two graphs for one text, whose taps they are given.

    Args:
        text: Its index.
        first_sequence: Number of the first sequence; the second is the next one.
        prompt: Its ids, [n].
        whole: Prompt and continuation.
        block_sizes: Anchor included.
        mask: The mask token's id.
    """
    last = len(whole) - 1

    def draft(sequence: int, position: int, size: int) -> Call:
        ids = [whole[position], *[mask] * (size - 1)]
        return Call(DRAFTER, sequence, text, position, ids, size, 0, f"block of {size} at {position}")

    def context(sequence: int, position: int, rows: int, taps_from: int, words: str) -> Call:
        return Call(CONTEXT, sequence, text, position, [], rows, taps_from, f"{words}, {rows} rows at {position}")

    yield context(first_sequence, 0, 1, 0, "context of one row")
    yield draft(first_sequence, 1, max(block_sizes))
    sequence, position = first_sequence + 1, min(len(prompt), last)
    yield context(sequence, 0, position, 0, "context of the prompt")
    for size in block_sizes:
        yield draft(sequence, position, size)
        if position + 2 > last:
            break
        # A whole block is appended, the rows of rejected tokens among them; the next append replaces those.
        yield context(sequence, position, min(size, last), 0, "context with rows of rejected tokens")
        yield context(sequence, position, 2, position, "context after a rollback")
        position += 2
    yield draft(sequence, position, max(block_sizes))


def capacity_rows(calls: Sequence[Call], block_size: int) -> int:
    """Rows a cache needs for all calls and for rounds over the same texts."""
    return max(call.position + call.rows for call in calls) + block_size + 8


def run_call(probe: GraphProbe, call: Call, taps: Array | None) -> Tensors:
    """One call; the taps are the text's, of which the context takes its rows."""
    if call.graph == TARGET:
        return probe.target(call.ids, call.position)
    if call.graph == CONTEXT:
        assert taps is not None
        return probe.context(taps[call.taps_from : call.taps_from + call.rows], call.position)
    return probe.draft(call.ids, call.position)

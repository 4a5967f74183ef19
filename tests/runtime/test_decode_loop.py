from __future__ import annotations

import itertools
import random
from collections.abc import Collection
from typing import Any

import pytest
from scripted_backend import VOCAB, LateBackend, ScriptedBackend, greedy

from dflash_runtime import NumericsError
from dflash_runtime.decode import Round, accept, decode

PROMPT = [5, 17, 3, 60, 42, 8]


def run(
    backend: ScriptedBackend,
    prompt: list[int] = PROMPT,
    *,
    new: int = 24,
    block: Any = 4,
    stop: Collection[int] = (),
    context: int | None = None,
) -> list[Round]:
    size_of = block if callable(block) else lambda n: block
    return list(
        decode(
            backend,
            prompt,
            max_new_tokens=new,
            max_context_tokens=context or backend.max_context,
            stop_token_ids=stop,
            block_size_of=size_of,
        )
    )


def tokens(rounds: list[Round]) -> list[int]:
    return [token for r in rounds for token in r.committed]


def counts(rounds: list[Round]) -> list[int]:
    return [len(r.committed) for r in rounds[1:]]


@pytest.mark.parametrize(
    ("proposed", "posterior", "committed"),
    [([], [9], [9]), ([1, 2], [1, 2, 3], [1, 2, 3]), ([1, 2], [1, 7, 3], [1, 7]), ([1, 2], [7, 2, 3], [7])],
)
def test_accept(proposed: list[int], posterior: list[int], committed: list[int]) -> None:
    assert accept(proposed, posterior) == committed


@pytest.mark.parametrize(("errors_at", "expected"), [((), [4, 4, 4, 4, 4, 4]), ((9, 14), [3, 4, 1, 4, 4, 4, 4])])
def test_rounds_commit_what_the_script_says(errors_at: tuple[int, ...], expected: list[int]) -> None:
    rounds = run(ScriptedBackend(errors_at=errors_at), new=25)  # the prefill's token, then 24
    assert counts(rounds) == expected
    assert tokens(rounds) == greedy(PROMPT, 25)


def test_last_block_shrinks_to_the_budget() -> None:
    backend = ScriptedBackend()
    rounds = run(backend, new=24)
    assert counts(rounds) == [4, 4, 4, 4, 4, 3]
    rounds = run(backend, new=7)
    assert [len(r.proposed) for r in rounds] == [0, 3, 2]
    assert (tokens(rounds), rounds[-1].finish_reason) == (greedy(PROMPT, 7), "length")


@pytest.mark.parametrize("new", range(1, 12))
@pytest.mark.parametrize("block", [1, 2, 4, 8])
def test_budget_is_exact(new: int, block: int) -> None:
    rounds = run(ScriptedBackend(errors_at=(9, 13)), new=new, block=block)
    assert tokens(rounds) == greedy(PROMPT, new)
    assert [r.finish_reason for r in rounds] == [None] * (len(rounds) - 1) + ["length"]


@pytest.mark.parametrize("index", range(9))
@pytest.mark.parametrize("block", [1, 4])
def test_stop_id_ends_the_output_inside_a_block(index: int, block: int) -> None:
    expected = greedy(PROMPT, 24)
    stop = expected[index]
    rounds = run(ScriptedBackend(), block=block, stop={stop})
    assert tokens(rounds) == expected[: expected.index(stop) + 1]
    assert rounds[-1].finish_reason == "stop"


def test_the_first_of_several_stop_ids_counts() -> None:
    expected = greedy(PROMPT, 24)
    for a, b in itertools.permutations(expected[:8], 2):
        first = min(expected.index(a), expected.index(b))
        assert tokens(run(ScriptedBackend(errors_at=(9,)), stop={a, b})) == expected[: first + 1]


def test_stop_wins_over_length() -> None:
    expected = greedy(PROMPT, 4)
    assert run(ScriptedBackend(), new=4, stop={expected[3]})[-1].finish_reason == "stop"


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 16])
@pytest.mark.parametrize("length", [1, 4, 5, 8, 10])
def test_every_prefill_chunk_reaches_the_drafter(chunk: int, length: int) -> None:
    prompt = [(7 * i + 3) % VOCAB for i in range(length)]
    backend = ScriptedBackend(prefill_chunk_tokens=chunk)
    assert tokens(run(backend, prompt, new=12)) == greedy(prompt, 12)  # draft() compares the rows
    pieces = [call[1:] for call in backend.calls if call[0] == "prefill"]
    assert pieces == [(min(chunk, length - at), at) for at in range(0, length, chunk)]


@pytest.mark.parametrize("prompt_length", [6, 13, 15, 16])
@pytest.mark.parametrize("block", [1, 4, 8])
def test_context_end_is_exact(prompt_length: int, block: int) -> None:
    prompt = [(5 * i + 1) % VOCAB for i in range(prompt_length)]
    backend = ScriptedBackend(max_context=16)  # asserts that no row is written past the capacity
    rounds = run(backend, prompt, new=100, block=block)
    assert tokens(rounds) == greedy(prompt, 17 - prompt_length)
    assert rounds[-1].finish_reason == "context"


def test_length_where_budget_and_context_end_together() -> None:
    assert run(ScriptedBackend(max_context=16), new=11)[-1].finish_reason == "length"
    assert run(ScriptedBackend(max_context=16), new=12)[-1].finish_reason == "context"


@pytest.mark.parametrize("seed", range(20))
def test_block_size_may_change_from_round_to_round(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice([1, 4, 8]) for _ in range(64)]
    errors = {rng.randrange(6, 60) for _ in range(12)}
    backend = ScriptedBackend(errors_at=errors)
    rounds = run(backend, new=50, block=lambda n: sizes[n])
    assert tokens(rounds) == greedy(PROMPT, 50)
    # all rows of a block go to the drafter, so that lengths are equal after every cycle
    for kind in ("verify", "append"):
        calls = [call[1:] for call in backend.calls if call[0] == kind][-len(rounds) + 1 :]
        assert [size for size, _ in calls] == [
            min(size, 56 - position) for size, (_, position) in zip(sizes, calls, strict=False)
        ]


def test_plain_steps_feed_the_drafter_too() -> None:
    backend = ScriptedBackend()
    rounds = run(backend, new=20, block=lambda n: 1 if n < 5 else 4)
    assert counts(rounds)[:5] == [1] * 5
    assert counts(rounds)[5] == 4


def test_logits_that_are_not_finite_stop_the_request() -> None:
    for block in (1, 4):
        with pytest.raises(NumericsError, match="position 9 "):
            run(ScriptedBackend(not_finite_at=9), block=block)
    with pytest.raises(NumericsError, match="position 6 "):
        run(ScriptedBackend(not_finite_at=6))


def test_rows_after_the_rejection_may_be_anything() -> None:
    rounds = run(ScriptedBackend(errors_at=(8,), not_finite_at=10), new=3)
    assert tokens(rounds) == greedy(PROMPT, 3)


def test_state_of_an_aborted_request_does_not_leak() -> None:
    backend = ScriptedBackend(errors_at=(9,))
    unfinished = decode(
        backend, [1] * 20, max_new_tokens=30, max_context_tokens=64, stop_token_ids=(), block_size_of=lambda n: 4
    )
    for _ in range(3):
        next(unfinished)
    unfinished.close()
    for prompt in ([2] * 6, [3] * 20, PROMPT):
        assert tokens(run(backend, prompt)) == greedy(prompt, 24)


@pytest.mark.parametrize("seed", range(60))
def test_reading_late_changes_nothing(seed: int) -> None:
    """Rounds, proposals and the blocks that are asked for; a stop may leave one cycle that commits nothing."""
    rng = random.Random(seed)
    sizes = [rng.choice([1, 2, 4, 8]) for _ in range(80)]
    new, context, stop = rng.choice([1, 2, 9, 40, 100]), rng.choice([16, 64]), greedy(PROMPT, 40)[rng.randrange(5, 40)]
    options: Any = {"new": new, "block": lambda n: sizes[n], "stop": rng.choice([(), (stop,)]), "context": context}
    errors = {rng.randrange(6, 60) for _ in range(rng.choice([0, 4, 20]))}
    known = ScriptedBackend(errors_at=errors, max_context=context)
    late = LateBackend(errors_at=errors, max_context=context)
    rounds = run(known, **options)
    assert run(late, **options) == rounds
    verified = [call for call in late.calls if call[0] == "verify"]
    assert verified[: len(rounds) - 1] == [call for call in known.calls if call[0] == "verify"]
    left = late.void_cycles if new > 1 else 0
    assert len(verified) == len(rounds) - 1 + left and left <= (rounds[-1].finish_reason == "stop")


def test_the_next_cycle_is_on_its_way_before_one_is_read() -> None:
    backend = LateBackend()
    rounds = decode(backend, PROMPT, max_new_tokens=40, max_context_tokens=64, stop_token_ids=(),
                    block_size_of=lambda n: 4)  # fmt: skip
    next(rounds)
    for _ in range(5):
        next(rounds)
        assert len(backend.unread) == 1
    rounds.close()

"""Requests that begin like the one before keep its rows, of both models: the words and proposals stay those of a
session that computes everything."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_backend import VOCAB, LateBackend, ScriptedBackend, greedy
from tiny_bundle import Sizes, write_bundle

import dflash_runtime.session as sessions
from dflash_runtime import GenerationConfig, GenerationResult, NumericsError, PromptError, Session, TextPieces
from dflash_runtime.bundle import Bundle, StateTensor
from dflash_runtime.errors import EngineError
from dflash_runtime.ort_cpu import OrtCpuBackend

FREE = GenerationConfig(max_new_tokens=6, stop_token_ids=())
PROMPT = [5, 17, 3, 60, 42, 8, 90, 11]


def config(**changes: Any) -> GenerationConfig:
    return dataclasses.replace(FREE, **changes)


def essence(result: GenerationResult) -> tuple[Any, ...]:
    return result.token_ids, result.text, result.acceptance_lengths, result.proposed_ids, result.finish_reason


@pytest.fixture
def fresh(tiny: Path) -> Iterator[Callable[..., Any]]:
    """What a session says that has served nothing before."""

    def say(prompt: list[int], options: GenerationConfig) -> Any:
        with Session.open(tiny, threads=1) as opened:
            return essence(opened.generate(prompt, options))

    yield say


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair with room for ten turns."""
    return write_bundle(tmp_path_factory.mktemp("wide") / "b", Sizes(likely_tokens=3, max_context=800))


def ten_turns(path: Path, options: Callable[[int], GenerationConfig]) -> list[tuple[GenerationResult, Any]]:
    """What a conversation of ten turns says, and what ten fresh sessions say."""
    found, messages = [], [{"role": "system", "content": "Be brief."}]
    with Session.open(path, threads=1, prefill_chunk_tokens=16) as session:
        for turn in range(10):
            messages.append({"role": "user", "content": f"q{turn}"})
            result = session.generate(messages, options(turn))
            with Session.open(path, threads=1, prefill_chunk_tokens=16) as alone:
                found.append((result, essence(alone.generate(messages, options(turn)))))
            messages.append({"role": "assistant", "content": result.text})
    return found


KINDS: dict[str, Callable[[int], GenerationConfig]] = {
    "drafted": lambda turn: config(max_new_tokens=9),
    "block sizes": lambda turn: config(max_new_tokens=9, block_size=(8, 2, 4)[turn % 3]),
    "plain, then drafted": lambda turn: config(max_new_tokens=9, plain=turn % 2 == 0),
    "sampled": lambda turn: config(
        max_new_tokens=9, temperature=0.3, seed=turn, repetition_penalty=1.2, presence_penalty=0.3),
    "greedy, then sampled": lambda turn: config(max_new_tokens=9, temperature=0.5 * (turn % 2), seed=4),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_ten_turns_are_ten_fresh_sessions(wide: Path, kind: str) -> None:
    found = ten_turns(wide, KINDS[kind])
    for result, alone in found:
        assert essence(result) == alone
    assert found[0][0].reused_token_count == 0
    for (before, _), (result, _) in itertools.pairwise(found):
        # All rows of the turn before are kept: its prompt, and its words without the newest. Bytes that are no text
        # come back as other tokens.
        rows = before.prompt_token_count + len(before.token_ids) - 1
        assert before.prompt_token_count <= result.reused_token_count <= rows
        assert result.reused_token_count == rows or "\ufffd" in before.text
    assert any(n > 1 for result, _ in found for n in result.acceptance_lengths)


def test_block_sizes_chosen_round_by_round(wide: Path) -> None:
    """They depend on times, and the words do not."""
    found = ten_turns(wide, lambda turn: config(max_new_tokens=9, block_size="auto"))
    assert all(result.token_ids == alone[0] for result, alone in found)


def test_only_the_new_tokens_are_run(tiny: Path) -> None:
    with Session.open(tiny, threads=1) as session:
        backend: Any = session._backend
        calls, prefill = [], backend.prefill
        backend.prefill = lambda ids, position: calls.append((list(ids), position)) or prefill(ids, position)
        first = session.generate(PROMPT, FREE)
        longer = [*PROMPT, *first.token_ids, 7, 9]
        assert session.generate(longer, FREE).reused_token_count == len(PROMPT) + 5
        assert calls == [(PROMPT, 0), ([first.token_ids[-1], 7, 9], len(PROMPT) + 5)]
        assert session.generate(longer, FREE).reused_token_count == len(longer) - 1  # the last is always run
        assert session.generate(longer[:4], FREE).reused_token_count == 3
        changed = [*PROMPT[:2], 99, *PROMPT[3:]]  # a template rendered an earlier token otherwise
        assert session.generate(changed, FREE).reused_token_count == 2
        assert session.generate([99], FREE).reused_token_count == 0
        assert calls[2:] == [(longer[-1:], len(longer) - 1), ([longer[3]], 3), (changed[2:], 2), ([99], 0)]


def test_progress_is_told_piece_by_piece(tiny: Path, fresh: Callable[..., Any]) -> None:
    told: list[tuple[int, int]] = []
    options = config(progress=lambda *numbers: told.append(numbers))
    with Session.open(tiny, threads=1, prefill_chunk_tokens=3) as session:
        first = session.generate(PROMPT, options)
        assert told == [(3, 8), (6, 8), (8, 8)] and essence(first) == fresh(PROMPT, FREE)
        told.clear()
        longer = [*PROMPT, *first.token_ids, 7]
        assert essence(session.generate(longer, options)) == fresh(longer, FREE)
        assert told == [(15, 15)]  # 13 are kept


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_a_request_ended_while_its_prompt_is_read_keeps_what_was_read(
    tiny: Path, fresh: Callable[..., Any], pieces: int
) -> None:
    def end(done: int, total: int) -> None:
        if done >= 3 * pieces or done == total:
            raise KeyboardInterrupt

    with Session.open(tiny, threads=1, prefill_chunk_tokens=3) as session, Session.open(tiny, threads=1) as alone:
        session.generate([9, 9, 9, *PROMPT], FREE)
        with pytest.raises(KeyboardInterrupt):
            session.generate(PROMPT, config(progress=end))
        assert check_rows(session, alone) == min(3 * pieces, len(PROMPT) - 1)
        result = session.generate(PROMPT, FREE)
        assert result.reused_token_count == min(3 * pieces, len(PROMPT) - 1)
        assert essence(result) == fresh(PROMPT, FREE)


def test_the_switch(tiny: Path) -> None:
    with Session.open(tiny, threads=1) as session:
        session.generate(PROMPT, FREE)
        result = session.generate(PROMPT, config(reuse_prefix=False))
        assert result.reused_token_count == result.to_json()["reused_token_count"] == 0
        assert session.generate(PROMPT, FREE).reused_token_count == len(PROMPT) - 1  # it left its rows all the same
        with pytest.raises(PromptError, match="reuse_prefix is 1 and must be True or False"):
            session.generate(PROMPT, config(reuse_prefix=1))


@pytest.mark.parametrize("seed", range(6))
def test_random_requests(tiny: Path, fresh: Callable[..., Any], seed: int) -> None:
    """Prompts that share something, streams left in the middle or never read, every kind of request."""
    rng = random.Random(seed)
    said, kept = list(PROMPT), 0
    with Session.open(tiny, threads=1, prefill_chunk_tokens=rng.choice([3, 128])) as session:
        for _ in range(9):
            prompt = said[: rng.randrange(1, min(len(said), 70) + 1)]
            prompt += [rng.randrange(97) for _ in range(rng.choice([0, 1, 9]))]
            sizes = [rng.choice([1, 1, 3, 4, 8]) for _ in range(60)]
            options = config(max_new_tokens=rng.choice([1, 2, 14, 90]), stop_token_ids=rng.choice([(), (97,)]))
            options = dataclasses.replace(options, **rng.choice([
                {"plain": True}, {"block_schedule": lambda n, s=sizes: s[n]}, {"temperature": 0.7, "seed": seed}]))
            stream = session.stream(prompt, options)
            if rng.random() < 0.4:  # left after some pieces, perhaps none
                pieces = [piece for piece, _ in zip(stream, range(rng.randrange(4)), strict=False)]
                said = prompt if pieces else said
                continue
            for _ in stream:
                pass
            assert essence(stream.result) == fresh(prompt, options)
            kept += stream.result.reused_token_count
            said = prompt + stream.result.token_ids
    assert kept > 0


def test_a_stop_string_or_a_reader_that_leaves_in_a_block(tiny: Path, fresh: Callable[..., Any]) -> None:
    with Session.open(tiny, threads=1) as session:
        assert session.tokenizer is not None
        options = config(max_new_tokens=40, block_size=8)
        whole = session.generate(PROMPT, options)
        ids = whole.token_ids
        for start in range(1, 30, 3):
            stop = session.tokenizer.decode(ids[start : start + 2])
            stopped = session.generate(PROMPT, dataclasses.replace(options, stop_strings=[stop]))
            then = [*PROMPT, *stopped.token_ids, 7, 30]
            assert essence(session.generate(then, options)) == fresh(then, options)
            stream = session.stream(PROMPT, options)
            for _ in range(1 + start // 6):
                next(stream)
            stream.close()
            then = [*PROMPT, *ids[:start], 7, 30]
            again = session.generate(then, options)
            assert essence(again) == fresh(then, options)
            assert again.reused_token_count >= len(PROMPT)


def test_the_end_of_the_context(tiny: Path, fresh: Callable[..., Any]) -> None:
    with Session.open(tiny, threads=1) as session:
        limit = session.bundle.manifest.max_context_tokens
        start = [(7 * i + 3) % 90 for i in range(limit - 6)]
        first = session.generate(start, config(max_new_tokens=50))
        assert first.finish_reason == "context"
        for length in (limit - 2, limit - 1, limit):
            prompt = (start + first.token_ids)[:length]
            result = session.generate(prompt, config(max_new_tokens=50))
            assert essence(result) == fresh(prompt, config(max_new_tokens=50))
            assert result.reused_token_count > limit - 8
        with pytest.raises(PromptError, match=f"{limit + 1} tokens"):
            session.generate((start + first.token_ids)[: limit + 1], FREE)
        assert session.generate(start, FREE).reused_token_count == len(start) - 1  # a refusal forgets nothing


def test_an_error_forgets_everything(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Session.open(tiny, threads=1) as session:
        backend: Any = session._backend
        session.generate(PROMPT, FREE)
        for name, error in (("verify", RuntimeError), ("append_context", KeyboardInterrupt), ("prefill", OSError)):
            true = getattr(backend, name)

            def broken(*arguments: Any, e: Any = error) -> Any:
                raise e

            monkeypatch.setattr(backend, name, broken)
            with pytest.raises(error):
                session.generate([*PROMPT, 1], FREE)
            monkeypatch.setattr(backend, name, true)
            assert session.generate([*PROMPT, 1], FREE).reused_token_count == 0
            assert session.generate([*PROMPT, 1], FREE).reused_token_count == len(PROMPT)


def test_rows_that_are_not_finite_are_wiped_and_not_kept(tiny: Path, fresh: Callable[..., Any]) -> None:
    with Session.open(tiny, threads=1) as session:
        backend: Any = session._backend
        first = session.generate(PROMPT, FREE)
        for state in (backend._target_state, backend._drafter_state):
            for rows in state.values():
                rows[:, :, 40:] = np.nan
        backend._not_finite = True  # as where a rejected row of a block was
        longer = [*PROMPT, *first.token_ids, 7]
        result = session.generate(longer, config(max_new_tokens=40))
        assert result.reused_token_count == 0
        assert essence(result) == fresh(longer, config(max_new_tokens=40))


def test_a_numerics_error_forgets_everything(tiny: Path) -> None:
    bundle = Bundle.open(tiny)
    toy = ScriptedBackend(max_context=96)
    with Session(bundle, toy, None) as session:
        session.generate(PROMPT, FREE)
        toy.not_finite_at = 11
        with pytest.raises(NumericsError):
            session.generate([*PROMPT, 1], FREE)
        toy.not_finite_at = None
        assert session.generate(PROMPT, FREE).reused_token_count == 0


def check_rows(session: Session, alone: Session) -> int:
    """Rows that count as right are those of a prefill of their tokens, in both models; returns how many they are."""
    backend, other = session._backend, alone._backend
    assert isinstance(backend, OrtCpuBackend) and isinstance(other, OrtCpuBackend) and session._current is not None
    ids = session._current.known_ids[:-1]
    backend._append_waiting()
    alone.generate(ids, config(max_new_tokens=1, reuse_prefix=False))
    other._append_waiting()
    for found, expected in (
        (backend._target_state, other._target_state), (backend._drafter_state, other._drafter_state)
    ):  # fmt: skip
        for name, rows in expected.items():
            np.testing.assert_allclose(found[name][:, :, : len(ids)], rows[:, :, : len(ids)], atol=1e-4, err_msg=name)
    return len(ids)


def check_rows_of_requests(tiny: Path) -> int:
    rng, said, count = random.Random(5), list(PROMPT), 0
    with Session.open(tiny, threads=1) as session, Session.open(tiny, threads=1) as alone:
        for number in range(14):
            said = said if len(said) < 60 else said[:20]
            prompt = said[: rng.choice([len(said), rng.randrange(max(1, len(said) - 9), len(said) + 1)])]
            prompt += [rng.randrange(97)] * rng.choice([1, 6])  # another text, so that a stale row is a wrong one
            options = config(max_new_tokens=rng.choice([3, 20]), **rng.choice([{"plain": True}, {"block_size": 8}]))
            stream = session.stream(prompt, options)
            for _ in range(20 if number % 3 else 2):
                next(stream, "")
            count += check_rows(session, alone)
            said = prompt + [token for done in stream.rounds for token in done.committed]
    return count


def test_the_rows_that_stay_are_those_of_a_prefill(tiny: Path) -> None:
    assert check_rows_of_requests(tiny) > 300


def scripted_session(tiny: Path, backend: ScriptedBackend) -> Session:
    return Session(Bundle.open(tiny), backend, None)


def random_requests(tiny: Path, kind: type[ScriptedBackend], seed: int) -> None:
    """The toy fails where a dead row is read, a row is skipped, or the drafter's rows are not the target's."""
    rng = random.Random(seed)
    toy = kind(errors_at={rng.randrange(6, 90) for _ in range(20)}, max_context=96, prefill_chunk_tokens=5)
    said, kept = list(PROMPT), 0
    with scripted_session(tiny, toy) as session:
        for _ in range(12):
            prompt = said[: rng.randrange(1, min(len(said), 60) + 1)] + [rng.randrange(VOCAB)] * rng.choice([0, 1, 6])
            sizes = [rng.choice([1, 1, 2, 4, 8]) for _ in range(100)]
            expected = greedy(prompt, rng.choice([1, 2, 9, 30]))
            stop = rng.choice([(), (expected[-1],)])
            options = config(max_new_tokens=len(expected), block_schedule=lambda n, s=sizes: s[n], stop_token_ids=stop)
            stream = session.stream(prompt, options)
            if rng.random() < 0.4:
                for _ in range(rng.randrange(4)):
                    if not stream.rounds or stream.rounds[-1].finish_reason is None:
                        stream._commit(stream._next_round())  # it has no text, so that a stream gives no pieces
                said = prompt if stream.rounds else said
                continue
            for _ in stream:
                pass
            cut = expected.index(stop[0]) + 1 if stop else len(expected)
            assert stream.result.token_ids == expected[:cut]
            kept += stream.result.reused_token_count
            said = prompt + stream.result.token_ids
    assert kept > 20


@pytest.mark.parametrize("kind", [ScriptedBackend, LateBackend])
@pytest.mark.parametrize("seed", range(12))
def test_lengths_are_equal_after_every_request(tiny: Path, kind: type[ScriptedBackend], seed: int) -> None:
    """One of the two kinds enqueues cycles ahead, of which the last may never be read."""
    random_requests(tiny, kind, seed)


def test_a_backend_may_keep_less(tiny: Path) -> None:
    class Forgetful(ScriptedBackend):
        def reset(self, kept_rows: int = 0) -> int:
            return super().reset(kept_rows // 2)

    with scripted_session(tiny, Forgetful(max_context=96)) as session:
        session.generate(PROMPT, FREE)
        result = session.generate([*PROMPT, 4], FREE)
        assert result.reused_token_count == len(PROMPT) // 2
        assert result.token_ids == greedy([*PROMPT, 4], 6)


def keeps_one_row_too_many(patch: pytest.MonkeyPatch) -> None:
    true = sessions._kept_rows
    patch.setattr(sessions, "_kept_rows", lambda known, prompt: min(true(known, prompt) + 1, len(prompt) - 1))


def forgets_the_drafters_rows(patch: pytest.MonkeyPatch) -> None:
    true = OrtCpuBackend.reset

    def reset(self: Any, kept_rows: int = 0) -> int:
        for rows in self._drafter_state.values():
            rows[:] = 0
        return true(self, kept_rows)

    patch.setattr(OrtCpuBackend, "reset", reset)


def drops_the_taps_of_plain_steps(patch: pytest.MonkeyPatch) -> None:
    true = OrtCpuBackend.reset

    def reset(self: Any, kept_rows: int = 0) -> int:
        self._waiting_rows = 0
        return true(self, kept_rows)

    patch.setattr(OrtCpuBackend, "reset", reset)


def counts_the_newest_too(patch: pytest.MonkeyPatch) -> None:
    true = sessions._kept_rows
    patch.setattr(sessions, "_kept_rows", lambda known, prompt: true([*known, -1], prompt))


@pytest.mark.parametrize("fault", [keeps_one_row_too_many, counts_the_newest_too])
def test_a_row_too_many_shows(tiny: Path, monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    fault(monkeypatch)
    for kind in (ScriptedBackend, LateBackend):
        with pytest.raises(AssertionError):
            for seed in range(6):
                random_requests(tiny, kind, seed)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_rows_of_requests(tiny)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [(forgets_the_drafters_rows, "drafted"), (drops_the_taps_of_plain_steps, "plain, then drafted")],
)
def test_missing_rows_of_the_drafter_show(wide: Path, monkeypatch: pytest.MonkeyPatch, fault: Any, kind: str) -> None:
    """Not in the words, which are the target's, but in the proposals."""
    fault(monkeypatch)
    found = ten_turns(wide, KINDS[kind])
    assert all(result.token_ids == alone[0] for result, alone in found)
    assert any(essence(result) != alone for result, alone in found)


def test_reuse_after_an_error_would_show(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter's context append fails, and what is remembered is what was there before."""
    true = TextPieces._next_round

    def next_round(self: Any) -> Any:
        before = list(self.known_ids)
        try:
            return true(self)
        except OSError:
            self.known_ids = [*before, -1]
            raise

    monkeypatch.setattr(TextPieces, "_next_round", next_round)
    toy = ScriptedBackend(max_context=96)
    with scripted_session(tiny, toy) as session:
        append, calls = toy.append_context, []

        def broken(rows: int, position: int) -> None:
            calls.append(position)
            if len(calls) == 3:
                raise OSError
            append(rows, position)

        monkeypatch.setattr(toy, "append_context", broken)
        with pytest.raises(OSError):
            session.generate(PROMPT, config(max_new_tokens=40))
        with pytest.raises(AssertionError):  # the drafter's rows are not the target's
            session.generate([*PROMPT, *greedy(PROMPT, 40)], FREE)


def test_state_that_cannot_be_set_back_by_length_is_refused() -> None:
    state = StateTensor("past.0", "present.0", "windowed_kv", ["B", 2, "T", 4], 8, "ring")
    with pytest.raises(EngineError, match=r"past\.0 is 'windowed_kv' .* with rollback 'ring'; .* with 'length'"):
        state.cache_shape(32)
    assert dataclasses.replace(state, rollback="length").cache_shape(32) == (1, 2, 32, 4)

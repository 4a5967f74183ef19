"""The backends `bench` puts around the real one: times of calls, and acceptance by script."""

from __future__ import annotations

import ast
import contextlib
import itertools
from pathlib import Path

import pytest
from scripted_backend import LateBackend
from scripted_backend import ScriptedBackend as ToyBackend

from dflash_runtime import GenerationConfig, Session
from dflash_runtime.bundle import Bundle
from dflash_runtime.tokenizer import Tokenizer
from dflash_tools import stage_times
from dflash_tools.bench_job import OURS, Job, Mode, Question
from dflash_tools.bench_ours import OurEngine
from dflash_tools.scripted_acceptance import AcceptanceScript, ScriptedBackend
from dflash_tools.stage_times import Call, TimedBackend, TimedCycles, request_times


def timed(calls: list[tuple[str, int, int, int]]) -> list[Call]:
    return [Call(name, rows, started / 1000, ended / 1000) for name, rows, started, ended in calls]


def test_calls_become_prefill_and_cycles() -> None:
    times = request_times(
        timed(
            [
                ("prefill", 4, 0, 10), ("context", 4, 10, 12), ("prefill", 2, 12, 18), ("context", 2, 18, 20),
                ("draft", 4, 21, 25), ("verify", 4, 25, 35), ("context", 4, 36, 38),
                ("draft", 2, 40, 43), ("verify", 2, 43, 50), ("context", 2, 50, 51),
            ]
        )
    )  # fmt: skip
    assert (times.prefill, times.prefill_context) == pytest.approx((16, 4))
    assert times.cycles == pytest.approx([18, 13])
    assert times.rows == [4, 2]
    assert times.stages[0] == pytest.approx({"draft": 4, "verify": 10, "context": 2, "host": 2})
    assert times.stages[1] == pytest.approx({"draft": 3, "verify": 7, "context": 1, "host": 2})


def test_plain_steps_are_cycles_of_a_verify() -> None:
    times = request_times(
        timed([("prefill", 1, 0, 5), ("context", 1, 5, 5), ("verify", 1, 6, 9), ("context", 1, 9, 9),
               ("verify", 1, 9, 12), ("context", 1, 12, 13)])
    )  # fmt: skip
    assert times.cycles == pytest.approx([4, 4])
    assert times.rows == [1, 1]
    assert sum(times.stages[0].values()) == pytest.approx(4)


def test_a_request_that_ends_with_the_prefill_has_no_cycles() -> None:
    assert request_times(timed([("prefill", 1, 0, 5), ("context", 1, 5, 6)])).cycles == []
    assert request_times([]).cycles == []


def test_a_backend_with_cycles_of_its_own_keeps_them(bundle: Path) -> None:
    opened, config = Bundle.open(bundle), GenerationConfig(max_new_tokens=21, block_size=4, stop_token_ids=[])
    toy = LateBackend()
    backend = stage_times.timed(toy)
    assert isinstance(backend, TimedCycles) and not isinstance(stage_times.timed(ToyBackend()), TimedCycles)
    with Session(opened, backend, Tokenizer.open(opened)) as session:
        result = session.generate([1, 2, 3], config)
    with Session(opened, ToyBackend(), Tokenizer.open(opened)) as session:
        assert result.token_ids == session.generate([1, 2, 3], config).token_ids
    times = request_times(backend.calls)
    assert len(times.cycles) == len(result.acceptance_lengths) == 5 and times.rows == [4] * 5
    assert all(stages["verify"] > 0 == stages["draft"] for stages in times.stages)


def test_every_call_of_a_request_is_noted_and_none_of_the_one_before(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    backend = TimedBackend(ToyBackend())
    with Session(opened, backend, Tokenizer.open(opened)) as session:
        session.generate([1, 2, 3], GenerationConfig(max_new_tokens=4, block_size=4, stop_token_ids=[]))
        result = session.generate([1, 2, 3], GenerationConfig(max_new_tokens=9, block_size=4, stop_token_ids=[]))
    times = request_times(backend.calls)
    assert len(times.cycles) == result.num_drafts == 2
    assert sum(times.rows) == 8  # nothing of the request before


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_a_script_commits_what_it_says(bundle: Path, tokens: int) -> None:
    opened = Bundle.open(bundle)
    backend = ScriptedBackend(ToyBackend(errors_at=range(0, 64, 2)))
    prompt = [5, 6]
    with Session(opened, backend, Tokenizer.open(opened)) as session:
        config = GenerationConfig(max_new_tokens=25, block_size=4, stop_token_ids=[])
        answer = session.generate(prompt, config).token_ids
        backend.script = AcceptanceScript(len(prompt), answer, tokens, 97)
        result = session.generate(prompt, config)
    assert result.token_ids == answer  # whatever is proposed, the words are the target's
    assert set(result.acceptance_lengths[:-1]) == {tokens}


def test_a_script_never_proposes_the_right_token_where_a_wrong_one_is_wanted() -> None:
    answer = list(range(10, 20))
    for drafted, position in itertools.product(([11, 12, 13], [0, 0, 0], [19, 12, 18]), range(3, 8)):
        proposed = AcceptanceScript(3, answer, 2, 20).proposals(drafted, position)
        true = answer[position - 2 : position + 1]
        assert len(proposed) == 3
        assert proposed[0] == true[0]
        assert proposed[1] != true[1]
    assert AcceptanceScript(3, answer, 4, 20).proposals([0, 0, 0], 2) == [10, 11, 12]
    assert AcceptanceScript(3, [], 2, 20).proposals([4, 5, 6], 2) == [4, 5, 6]  # nothing known, nothing changed


def test_every_repetition_of_bench_runs_the_whole_prompt(bundle: Path) -> None:
    modes = [Mode(1), Mode(4), Mode(4)]
    question = Question([*range(1, 31)], None, 9, [])
    job = Job(
        engine=OURS, bundle=str(bundle), backend="ort-cpu", threads=1, device="cpu", precision="fp32", model=None,
        drafter=None, served_model=None, template_args={}, modes=modes, questions=[question], turn=0,
    )  # fmt: skip
    with contextlib.closing(OurEngine(job)) as engine:
        for mode in modes:
            answer = engine.answer(mode, 0, question)
            assert [call.rows for call in engine._timed.calls if call.name == "prefill"] == [30]
            assert answer.prefill_ms is not None and answer.prefill_ms > 0
        assert engine._session.generate([*question.ids, 5], GenerationConfig()).reused_token_count == 30


def test_whatever_measures_or_checks_runs_the_whole_prompt() -> None:
    """Only what answers a user keeps rows from the request before."""
    keeps = {"run_command", "chat_command", "chat_turns"}
    calls = 0
    for file in sorted(Path(stage_times.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "GenerationConfig" and node.keywords:
                says = [k for k in node.keywords if k.arg == "reuse_prefix"]
                off = bool(says) and isinstance(says[0].value, ast.Constant) and says[0].value.value is False
                assert off or file.stem in keeps or file.stem.startswith("serve_"), f"{file}:{node.lineno}"
                calls += off
    assert calls > 8

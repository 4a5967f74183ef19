"""Turns, the memory budget and faults, with workers that do what the test says."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from serve_calls import wait_until

from dflash_runtime.errors import EngineError
from dflash_runtime.generation import GenerationConfig
from dflash_tools.serve_bundles import ServedBundle
from dflash_tools.serve_errors import ApiError
from dflash_tools.serve_jobs import Failed, Job, Question
from dflash_tools.serve_pool import BundlePool
from dflash_tools.serve_queue import FairQueue

QUESTION = Question("hi", GenerationConfig())


def test_clients_take_turns() -> None:
    line: FairQueue[str] = FairQueue()
    for i in range(4):
        line.push("much", f"much {i}")
    line.push("little", "little 0")
    assert line.pop() == "much 0"
    line.push("late", "late 0")
    assert line.remove("much", "much 2")
    assert not line.remove("much", "much 2")
    assert not line.remove("nobody", "x")
    assert len(line) == 4
    assert [line.pop() for _ in range(5)] == ["little 0", "much 1", "late 0", "much 3", None]


class Workers:
    """A pool whose bundles answer one job for each `step`; keeps what was done in which order."""

    def __init__(self, sizes: dict[str, int], budget_bytes: int | None = None, max_waiting: int = 50) -> None:
        self.done: list[str] = []
        self.told: list[Any] = []
        self.steps: queue.Queue[Exception | None] = queue.Queue()
        self.faults: dict[str, Exception] = {}
        bundles = [ServedBundle(name, Path(name), size, "x", 0) for name, size in sizes.items()]
        self.pool = BundlePool(bundles, self._load, budget_bytes, max_waiting)

    def ask(self, name: str, client: str = "c") -> Job:
        job = Job(client, QUESTION, self.told.append)
        self.pool.submit(name, [job])
        return job

    def step(self, count: int = 1, fault: Exception | None = None) -> None:
        before = self.answered()
        for _ in range(count):
            self.steps.put(fault)
        wait_until(lambda: self.answered() >= before + count)

    def answered(self) -> int:
        return sum(" for " in line for line in self.done)

    def _load(self, facts: ServedBundle) -> Any:
        if facts.name in self.faults:
            raise self.faults[facts.name]
        workers = self

        class Loaded:
            def run(self, job: Job) -> None:
                fault = workers.steps.get()
                workers.done.append(f"{facts.name} for {job.client}")
                if fault is not None:
                    raise fault

            def close(self) -> None:
                workers.done.append(f"{facts.name} leaves")

        return Loaded()

    def close(self) -> None:
        for _ in range(50):
            self.steps.put(None)
        self.pool.close()


@pytest.fixture
def closing() -> Any:
    opened: list[Workers] = []
    yield opened
    for workers in opened:
        workers.close()


def test_a_client_that_floods_waits_for_itself(closing: list[Workers]) -> None:
    closing.append(workers := Workers({"a": 1}))
    for _ in range(20):
        workers.ask("a", "flood")
    wait_until(lambda: workers.pool.running() == 1)
    workers.ask("a", "small")
    workers.step(3)
    assert workers.done == ["a for flood", "a for flood", "a for small"]


def test_the_queue_is_bounded_and_a_request_is_taken_whole_or_not(closing: list[Workers]) -> None:
    closing.append(workers := Workers({"a": 1}, max_waiting=3))
    workers.ask("a")
    wait_until(lambda: workers.pool.running() == 1)
    workers.ask("a")
    workers.ask("a")
    with pytest.raises(ApiError, match="2 answers wait already, and the queue has 3 places") as caught:
        workers.pool.submit("a", [Job("c", QUESTION, workers.told.append) for _ in range(2)])
    assert (caught.value.status, caught.value.headers()) == (429, {"Retry-After": "2"})
    assert workers.pool.waiting() == 2
    workers.ask("a")


def test_a_cancelled_job_frees_its_place(closing: list[Workers]) -> None:
    closing.append(workers := Workers({"a": 1}))
    workers.ask("a", "first")
    wait_until(lambda: workers.pool.running() == 1)
    waiting = workers.ask("a", "second")
    workers.ask("a", "third")
    workers.pool.cancel(waiting)
    assert workers.pool.waiting() == 1
    workers.step(2)
    assert workers.done == ["a for first", "a for third"]


def test_the_least_recently_used_bundle_leaves(closing: list[Workers]) -> None:
    closing.append(workers := Workers({"a": 4, "b": 4, "c": 4}, budget_bytes=8))
    for name in ("a", "b", "a", "c"):
        workers.ask(name)
        workers.step()
    wait_until(lambda: workers.pool.running() == 0)
    assert [line for line in workers.done if "leaves" in line] == ["b leaves"]
    assert workers.pool.loaded() == ["a", "c"]
    assert workers.pool.loaded_bytes() == 8


def test_a_busy_bundle_first_answers_what_is_older_and_then_makes_room(closing: list[Workers]) -> None:
    closing.append(workers := Workers({"a": 5, "b": 5}, budget_bytes=8))
    workers.ask("a")
    workers.ask("a")
    workers.ask("b")
    workers.ask("a")
    workers.step(3)
    wait_until(lambda: workers.pool.loaded() == ["a"] and workers.pool.running() == 1)
    assert workers.done == ["a for c", "a for c", "a leaves", "b for c", "b leaves"]


def test_a_fault_is_told_and_the_next_answer_comes_from_a_new_session(closing: list[Workers]) -> None:
    closing.append(workers := Workers({"a": 1}))
    workers.ask("a", "unlucky")
    workers.step(1, RuntimeError("a fault"))
    wait_until(lambda: len(workers.told) == 1)
    assert isinstance(workers.told[0], Failed)
    assert workers.told[0].error.status == 500
    workers.ask("a", "next")
    workers.step()
    assert workers.done == ["a for unlucky", "a leaves", "a for next"]


def test_a_bundle_that_cannot_be_loaded_refuses_and_is_tried_again(closing: list[Workers]) -> None:
    closing.append(workers := Workers({"a": 1, "b": 1}))
    workers.faults["a"] = EngineError("no engine here")
    with pytest.raises(EngineError, match="no engine here"):
        workers.pool.preload()
    workers.ask("a")
    wait_until(lambda: len(workers.told) == 1)
    assert workers.told[0].error.status == 503
    assert "no engine here" in str(workers.told[0].error)
    del workers.faults["a"]
    workers.ask("a")
    workers.step()
    assert workers.done == ["a for c"]


def test_preloading_needs_room_for_all(closing: list[Workers]) -> None:
    closing.append(workers := Workers({"a": 5, "b": 5}, budget_bytes=8))
    with pytest.raises(Exception, match="10 B together and --memory-budget is 8 B"):
        workers.pool.preload()
    closing.append(both := Workers({"a": 4, "b": 4}, budget_bytes=8))
    both.pool.preload()
    assert both.pool.loaded() == ["a", "b"]


def test_the_end_fails_who_waits(closing: list[Workers]) -> None:
    closing.append(workers := Workers({"a": 1}))
    running, waiting = workers.ask("a"), workers.ask("a")
    wait_until(lambda: workers.pool.running() == 1)
    assert workers.pool.abandon() == 2
    assert running.cancelled and waiting.cancelled
    assert [told.error.code for told in workers.told] == ["shutting_down"] * 2
    with pytest.raises(ApiError, match="shutting down"):
        workers.ask("a")
    workers.steps.put(None)
    workers.pool.close()
    assert not any(thread.name == "bundle a" for thread in threading.enumerate())


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_asked_is_answered_once_within_the_budget(seed: int) -> None:
    random, told, most = Random(seed), Counter[int](), []
    sizes = {"a": 3, "b": 4, "c": 5, "d": 2}

    class Loaded:
        def run(self, job: Job) -> None:
            most.append(pool.loaded_bytes())
            job.emit("answer")  # type: ignore[arg-type]

        def close(self) -> None:
            pass

    bundles = [ServedBundle(name, Path(name), size, "x", 0) for name, size in sizes.items()]
    pool = BundlePool(bundles, lambda facts: Loaded(), 8, 1000)
    cancelled: set[int] = set()

    def note(number: int, event: Any) -> None:
        told[number] += 1

    for number in range(300):
        job = Job(f"client {random.randrange(5)}", QUESTION, partial(note, number))
        pool.submit(random.choice("abcd"), [job])
        if random.random() < 0.1:
            cancelled.add(number)
            pool.cancel(job)
    wait_until(lambda: pool.waiting() == pool.running() == 0)
    wait_until(lambda: set(told) >= set(range(300)) - cancelled)
    pool.close()
    assert max(told.values()) == 1
    assert max(most) <= 8
    assert pool.loaded() == []

"""Where the time of a request goes: a backend that notes when each call began and ended, and what follows from it."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, Literal

import numpy.typing as npt

from dflash_runtime.backend import Backend, Cycles, Round

STAGES = ("draft", "verify", "context", "host")
"""Parts of a cycle. Context: the drafter's context append; host: everything between calls of the backend."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of the backend; times on the clock `time.perf_counter`."""

    name: str
    """prefill, context, draft or verify."""
    rows: int
    started_s: float
    ended_s: float


class TimedBackend:
    """Passes every call on and keeps its times, for the request since the last `reset`."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.name = backend.name
        self.prefill_chunk_tokens = backend.prefill_chunk_tokens
        self.calls: list[Call] = []

    def reset(self, kept_rows: int = 0) -> int:
        """See `Backend.reset`; the calls of the request before are forgotten."""
        self.calls = []
        return self._backend.reset(kept_rows)

    def prefill(self, ids: Sequence[int], position: int) -> int:
        """See `Backend.prefill`."""
        started = time.perf_counter()
        token = self._backend.prefill(ids, position)
        self._note("prefill", len(ids), started)
        return token

    def draft(self, anchor: int, block_size: int, position: int) -> list[int]:
        """See `Backend.draft`."""
        started = time.perf_counter()
        proposed = self._backend.draft(anchor, block_size, position)
        self._note("draft", block_size, started)
        return proposed

    def verify(self, block: Sequence[int], position: int) -> list[int]:
        """See `Backend.verify`."""
        started = time.perf_counter()
        said = self._backend.verify(block, position)
        self._note("verify", len(block), started)
        return said

    def outputs(self, kind: Literal["target", "drafter"], rows: int) -> dict[str, npt.NDArray[Any]]:
        """See `Backend.outputs`."""
        return self._backend.outputs(kind, rows)

    def append_context(self, rows: int, position: int) -> None:
        """See `Backend.append_context`."""
        started = time.perf_counter()
        self._backend.append_context(rows, position)
        self._note("context", rows, started)

    def close(self) -> None:
        """See `Backend.close`."""
        self._backend.close()

    def _note(self, name: str, rows: int, started_s: float) -> None:
        self.calls.append(Call(name, rows, started_s, time.perf_counter()))


class TimedCycles(TimedBackend):
    """Of a backend that runs cycles itself: of each the host sees the wait for it, which counts as verify."""

    def __init__(self, backend: Backend, cycles: Cycles) -> None:
        super().__init__(backend)
        self._cycles, self.cycles_ahead = cycles, cycles.cycles_ahead
        self._blocks = deque[int]()

    def start_cycles(self, anchor: int, position: int, limit: int, stop_ids: Collection[int]) -> None:
        """See `Cycles.start_cycles`."""
        self._blocks.clear()
        self._cycles.start_cycles(anchor, position, limit, stop_ids)

    def enqueue_cycle(self, block_size: int) -> None:
        """See `Cycles.enqueue_cycle`."""
        self._blocks.append(block_size)
        self._cycles.enqueue_cycle(block_size)

    def read_cycle(self) -> Round:
        """See `Cycles.read_cycle`."""
        started = time.perf_counter()
        done = self._cycles.read_cycle()
        self._note("verify", self._blocks.popleft(), started)
        return done


def timed(backend: Backend) -> TimedBackend:
    """A backend with its times; it runs its own cycles where it can."""
    return TimedCycles(backend, backend) if isinstance(backend, Cycles) else TimedBackend(backend)


@dataclasses.dataclass(frozen=True)
class RequestTimes:
    """One request, in milliseconds."""

    prefill: float
    """The target's passes over the prompt."""
    prefill_context: float
    """The drafter's context rows for the prompt."""
    cycles: list[float]
    """From the end of the cycle before (of the prefill for the first) to the end of this one."""
    stages: list[dict[str, float]]
    """The stages of each cycle; they sum up to it."""
    rows: list[int]
    """Rows the target verified in each cycle: the block size, fewer where the output's end cut the block."""


def request_times(calls: Sequence[Call]) -> RequestTimes:
    """Sorts the calls of a request into prefill and cycles; a cycle begins with a draft, or with a verify alone."""
    groups: list[list[Call]] = [[]]
    for call in calls:
        begins = call.name == "draft" or (call.name == "verify" and (not groups[-1] or groups[-1][-1].name != "draft"))
        if begins:
            groups.append([])
        groups[-1].append(call)
    before, *cycles = groups
    taken = {name: sum(_ms(call) for call in before if call.name == name) for name in ("prefill", "context")}
    times, stages = [], []
    rows = [next((call.rows for call in group if call.name == "verify"), 0) for group in cycles]
    end = before[-1].ended_s if before else cycles[0][0].started_s if cycles else 0.0
    for group in cycles:
        whole = 1000 * (group[-1].ended_s - end)
        parts = {name: sum(_ms(call) for call in group if call.name == name) for name in STAGES[:3]}
        times.append(whole)
        stages.append({**parts, "host": whole - sum(parts.values())})
        end = group[-1].ended_s
    return RequestTimes(taken["prefill"], taken["context"], times, stages, rows)


def _ms(call: Call) -> float:
    return 1000 * (call.ended_s - call.started_s)

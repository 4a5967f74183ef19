"""Bundles loaded on demand, each with a worker thread that owns its session and a fair queue before it.

Where the memory budget has no room for another bundle, the one least recently used leaves: at once when it is idle,
else as soon as it has answered what was asked of it before.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from dflash_runtime.errors import DFlashError
from dflash_tools.serve_bundles import ServedBundle
from dflash_tools.serve_errors import ApiError
from dflash_tools.serve_jobs import Failed, Job
from dflash_tools.serve_queue import FairQueue
from dflash_tools.sizes import bytes_text

_log = logging.getLogger(__name__)
_SHUTTING_DOWN = "The server is shutting down. Ask again when it is back."


class Loaded(Protocol):
    """What answers jobs, in the thread that made it."""

    def run(self, job: Job) -> None:
        """Answers one, or tells why not."""

    def close(self) -> None:
        """Frees its memory."""


@dataclasses.dataclass(eq=False)
class _Seat:
    """A bundle's place, loaded or not. Its fields are read and written under the pool's lock."""

    facts: ServedBundle
    queue: FairQueue[Job] = dataclasses.field(default_factory=FairQueue)
    thread: threading.Thread | None = None
    holds_memory: bool = False
    running: Job | None = None
    wants_room_since: int | None = None
    """Ticket of the oldest job that waits for the bundle to be loaded."""
    leave_after: int | None = None
    """Unload when no job up to this ticket is left."""
    last_ticket: int = 0
    """Of the job it ran last."""
    preload: bool = False
    outcome: DFlashError | bool | None = None
    """True once it was loaded, or why it could not be."""


class BundlePool:
    """All bundles of a server.

    Args:
        bundles: What is served.
        load: Opens one of them; called in the thread that will use it.
        budget_bytes: Most memory of loaded bundles together, by their estimates; None: no limit.
        max_waiting: Most jobs that wait at a time.
    """

    def __init__(self, bundles: Sequence[ServedBundle], load: Callable[[ServedBundle], Loaded],
                 budget_bytes: int | None, max_waiting: int) -> None:
        self._seats = {facts.name: _Seat(facts) for facts in bundles}
        self._load, self._max_waiting = load, max_waiting
        self._budget_bytes = math.inf if budget_bytes is None else budget_bytes
        self._changed = threading.Condition()
        self._tickets = 0
        self._mean_s = 1.0  # of running a job, lately
        self._closing = False

    def submit(self, name: str, jobs: Sequence[Job]) -> None:
        """Puts jobs of one request into the queue of a bundle, all or none.

        Raises:
            ApiError: the queue is full or too short for them, or the server is shutting down.
        """
        if len(jobs) > self._max_waiting:
            raise ApiError(400, f"{len(jobs)} answers are asked for at once, and this server's queue has "
                           f"{self._max_waiting} places. Ask for fewer.", param="n", code="invalid_value")  # fmt: skip
        with self._changed:
            if self._closing:
                raise ApiError(503, _SHUTTING_DOWN, code="shutting_down")
            waiting = self.waiting()
            if waiting + len(jobs) > self._max_waiting:
                wait_s = max(1, math.ceil(self._mean_s * waiting))
                raise ApiError(429, f"{waiting} answers wait already, and the queue has {self._max_waiting} places. "
                               f"Ask again in {wait_s} s.", code="queue_full", retry_after_s=wait_s)  # fmt: skip
            seat = self._seats[name]
            for job in jobs:
                self._tickets += 1
                job.ticket = self._tickets
                seat.queue.push(job.client, job)
            self._start(seat)
            self._changed.notify_all()

    def cancel(self, job: Job) -> None:
        """Nobody wants the answer any more: the job leaves the queue, or ends after its current round."""
        with self._changed:
            job.cancelled = True
            if any(seat.queue.remove(job.client, job) for seat in self._seats.values()):
                self._changed.notify_all()

    def preload(self) -> None:
        """Loads every bundle and waits until each is.

        Raises:
            DFlashError: one cannot be loaded, or the budget has no room for all.
        """
        needed = sum(seat.facts.memory_bytes for seat in self._seats.values())
        if needed > self._budget_bytes:
            raise DFlashError(f"The bundles need {bytes_text(needed)} together and --memory-budget is "
                              f"{bytes_text(int(self._budget_bytes))}. Raise it or leave out --preload.")  # fmt: skip
        with self._changed:
            for seat in self._seats.values():
                seat.preload = True
                self._start(seat)
            while not all(seat.outcome for seat in self._seats.values()):
                self._changed.wait()
        for seat in self._seats.values():
            if isinstance(seat.outcome, DFlashError):
                raise seat.outcome

    def abandon(self) -> int:
        """Takes no more jobs, fails those that wait and ends those that run; returns how many these were."""
        with self._changed:
            self._closing = True
            jobs = [job for seat in self._seats.values() for job in seat.queue.items()]
            jobs += [seat.running for seat in self._seats.values() if seat.running and not seat.running.cancelled]
            for seat in self._seats.values():
                seat.queue = FairQueue()
            for job in jobs:
                if not job.cancelled:
                    job.cancelled = True
                    job.emit(Failed(ApiError(503, _SHUTTING_DOWN, code="shutting_down")))
            self._changed.notify_all()
        return len(jobs)

    def close(self) -> None:
        """Ends everything and frees all memory; returns when it is done."""
        self.abandon()
        for seat in self._seats.values():
            if (thread := seat.thread) is not None:
                thread.join()

    def waiting(self) -> int:
        """Jobs that wait for their turn."""
        return sum(len(seat.queue) for seat in self._seats.values())

    def running(self) -> int:
        """Jobs that are being answered."""
        return sum(seat.running is not None for seat in self._seats.values())

    def loaded(self) -> list[str]:
        """Names of the bundles in memory."""
        return [name for name, seat in self._seats.items() if seat.holds_memory]

    def loaded_bytes(self) -> int:
        """Their memory, as it was estimated."""
        return sum(seat.facts.memory_bytes for seat in self._seats.values() if seat.holds_memory)

    def _start(self, seat: _Seat) -> None:
        if seat.thread is None:
            self._claim(seat)  # now, and not when the thread comes to run
            seat.thread = threading.Thread(target=self._work, args=(seat,), name=f"bundle {seat.facts.name}")
            seat.thread.start()

    def _work(self, seat: _Seat) -> None:
        """A bundle's thread: it ends when nothing is asked of the bundle and it is not loaded."""
        while self._take_room(seat):
            try:
                loaded = self._load(seat.facts)
            except Exception as error:
                self._refuse_all(seat, error)
            else:
                self._told(seat, True)
                try:
                    self._serve(seat, loaded)
                finally:
                    loaded.close()
                    del loaded
            with self._changed:
                seat.holds_memory, seat.leave_after = False, None
                self._changed.notify_all()

    def _take_room(self, seat: _Seat) -> bool:
        """Waits until the budget has room for the bundle; False when nobody asks for it any more."""
        with self._changed:
            while seat.preload or len(seat.queue):
                if self._closing:
                    break
                if self._claim(seat):
                    seat.holds_memory, seat.wants_room_since, seat.preload = True, None, False
                    self._changed.notify_all()
                    return True
                self._changed.wait()
            seat.thread = seat.wants_room_since = seat.leave_after = None
            self._changed.notify_all()
            return False

    def _claim(self, seat: _Seat) -> bool:
        """Whether there is room for a bundle and nobody has waited longer; if not, others are asked to leave.

        Those who wait longer count as if they were loaded. Idle bundles leave first, then the least recently used;
        what is busy first answers what is older than this claim.
        """
        claim = seat.wants_room_since = min((job.ticket for job in seat.queue.items()), default=0)
        others = [other for other in self._seats.values() if other is not seat]
        earlier = [s for s in others if s.wants_room_since is not None and s.wants_room_since < claim]
        before = [*earlier, *(s for s in others if s.holds_memory)]
        missing = sum(s.facts.memory_bytes for s in before) + seat.facts.memory_bytes - self._budget_bytes
        for other in sorted(before, key=lambda s: (s.running is not None or len(s.queue) > 0, s.last_ticket)):
            if missing <= 0:
                break
            missing -= other.facts.memory_bytes
            if other.leave_after is None:
                other.leave_after = claim
                self._changed.notify_all()
        return not earlier and self.loaded_bytes() + seat.facts.memory_bytes <= self._budget_bytes

    def _serve(self, seat: _Seat, loaded: Loaded) -> None:
        """Runs jobs until the bundle is to be unloaded, or a fault makes its session one not to trust."""
        while (job := self._next(seat)) is not None:
            started = time.monotonic()
            try:
                loaded.run(job)
            except Exception:  # a fault in this program: told to the client, kept in the log, session opened anew
                _log.exception("An answer of %s failed.", seat.facts.name)
                job.emit(Failed(ApiError(500, "The server failed at this answer; its log says how.", code="fault")))
                self._ran(seat, time.monotonic() - started)
                return
            self._ran(seat, time.monotonic() - started)

    def _next(self, seat: _Seat) -> Job | None:
        with self._changed:
            while True:
                waiting, ticket = seat.queue.items(), seat.leave_after
                if self._closing or (ticket is not None and all(job.ticket > ticket for job in waiting)):
                    return None
                if (job := seat.queue.pop()) is not None:
                    seat.running, seat.last_ticket = job, job.ticket
                    return job
                self._changed.wait()

    def _ran(self, seat: _Seat, seconds: float) -> None:
        with self._changed:
            seat.running = None
            self._mean_s += 0.2 * (seconds - self._mean_s)
            self._changed.notify_all()

    def _refuse_all(self, seat: _Seat, error: Exception) -> None:
        """The bundle cannot be loaded: whoever waits for it is told."""
        if not isinstance(error, DFlashError):
            _log.exception("Loading %s failed.", seat.facts.name)
        told = error if isinstance(error, DFlashError) else DFlashError(f"Loading {seat.facts.name} failed: {error!r}.")
        with self._changed:
            jobs, seat.queue = seat.queue.items(), FairQueue()
        self._told(seat, told)
        for job in jobs:
            job.emit(Failed(ApiError(503, f"The model {seat.facts.name} cannot be loaded: {told}", code="load_failed")))

    def _told(self, seat: _Seat, outcome: DFlashError | bool) -> None:
        with self._changed:
            seat.outcome = outcome
            self._changed.notify_all()

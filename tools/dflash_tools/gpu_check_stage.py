"""Runs the stages of a GPU check in processes of their own, so that a crash or a hang ends one stage alone."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_runtime.bundle import write_atomically

DONE, FAILED, SKIPPED = "done", "failed", "skipped"
_LEAST_S = 5.0
_LAST_LINES = 12


class Skipped(Exception):  # noqa: N818 - it is no error
    """What a stage raises where it cannot be executed here; the text says why."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """One step."""

    name: str
    budget_s: float
    command: Sequence[str]
    """Writes `{"status", "reason", "data"}` to the file named by its last argument, which is added."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a stage ended."""

    name: str
    status: str
    """`done`: executed to its end and what it asserts held; `failed`; `skipped`: not executed."""
    reason: str
    """Why it failed or was skipped; empty where it is done."""
    seconds: float
    data: dict[str, Any]
    """What it measured."""


def run_stages(stages: Sequence[Stage], limit_s: float, report: Callable[[list[Outcome]], None],
               environment: Mapping[str, str]) -> list[Outcome]:
    """Runs all stages, whatever becomes of any of them.

    Args:
        stages: In order.
        limit_s: For all together; stages it leaves no time for are skipped.
        report: Called with the outcomes so far, after each stage.
        environment: Of the stages' processes.
    """
    outcomes: list[Outcome] = []
    started = time.monotonic()
    for stage in stages:
        left = limit_s - (time.monotonic() - started)
        if left < _LEAST_S:
            outcomes.append(Outcome(stage.name, SKIPPED, f"the limit of {limit_s:.0f} s for all is reached", 0.0, {}))
        else:
            outcomes.append(_run(stage, min(stage.budget_s, left), environment))
        report(outcomes)
    return outcomes


def _run(stage: Stage, budget_s: float, environment: Mapping[str, str]) -> Outcome:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "log"
        with log.open("wb") as stream:
            process = subprocess.Popen([*stage.command, str(answer)], stdout=stream, stderr=subprocess.STDOUT,
                                       stdin=subprocess.DEVNULL, env=dict(environment), start_new_session=True)
            try:
                code: int | None = process.wait(budget_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                code = None
        last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
        seconds = round(time.monotonic() - started, 2)
        if code is None:
            return Outcome(stage.name, FAILED, f"stopped after its budget of {budget_s:.0f} s", seconds, {"log": last})
        return _read(stage.name, code, answer, last, seconds)


def _read(name: str, code: int, answer: Path, last: list[str], seconds: float) -> Outcome:
    try:
        told = json.loads(answer.read_text(encoding="utf-8"))
        status, reason, data = str(told["status"]), str(told["reason"]), dict(told["data"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        words = f"its process ended with exit code {code} and no result ({type(error).__name__})"
        return Outcome(name, FAILED, words, seconds, {"log": last})
    if code != 0 or status not in (DONE, FAILED, SKIPPED):
        words = f"exit code {code} with status {status!r}: {reason}"
        return Outcome(name, FAILED, words, seconds, {"log": last, **data})
    return Outcome(name, status, reason, seconds, data)


def answer_for(work: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Executes a stage's work, which fills in what it measures, and says how it ended."""
    data: dict[str, Any] = {}
    try:
        work(data)
    except Skipped as skipped:
        return {"status": SKIPPED, "reason": str(skipped), "data": data}
    except Exception as error:  # whatever it is, it is this stage's result
        return {"status": FAILED, "reason": f"{type(error).__name__}: {error}"[:2000], "data": data}
    return {"status": DONE, "reason": "", "data": data}


def write_outcomes(path: Path, outcomes: Sequence[Outcome], facts: Mapping[str, Any]) -> None:
    """Writes everything as one JSON file, complete at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    told = {**facts, "stages": [dataclasses.asdict(outcome) for outcome in outcomes]}
    write_atomically(path, json.dumps(told, indent=1, default=str) + "\n")


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """One line for each stage."""
    width = max(len(outcome.name) for outcome in outcomes)
    rows = [(outcome, " ".join(outcome.reason.split())[:160]) for outcome in outcomes]
    return [f"{o.name:<{width}}  {o.status:<7}  {o.seconds:>6.1f} s  {reason}".rstrip() for o, reason in rows]

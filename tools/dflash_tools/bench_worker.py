"""Measures one engine in a process of its own: `python -m dflash_tools.bench_worker JOB.json RESULT.json`.

Where weights come to lie in memory decides more than many an engine does: of two models in one process, the one opened
first was the faster one. So every engine is opened alone, and again in every round.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import click

from dflash_tools.bench_job import (
    AUTHORS,
    GENAI,
    OURS,
    SERVER,
    TRANSFORMERS,
    Answer,
    EngineRun,
    Job,
    Mode,
    Question,
    read_job,
    write_json,
)
from dflash_tools.error_lines import DFlashCommand, needs_extra
from dflash_tools.peak_memory import own_peak_bytes

WARM_UP_TOKENS = 16


class Engine(Protocol):
    """Something that answers requests one after another."""

    precision: str
    versions: dict[str, str]

    def answer(self, mode: Mode, number: int, question: Question) -> Answer:
        """Runs one request."""

    def close(self) -> None:
        """Frees what the engine holds."""


def open_engine(job: Job) -> Engine:
    """Opens the engine a job names; DFlashError where it cannot be opened."""
    if job.engine == OURS:
        from dflash_tools.bench_ours import OurEngine

        return OurEngine(job)
    if job.engine == SERVER:
        from dflash_tools.bench_server import ServerEngine

        return ServerEngine(job)
    from dflash_tools import bench_peers

    kinds: dict[str, Callable[[Job], Engine]] = {
        TRANSFORMERS: bench_peers.TransformersEngine,
        AUTHORS: bench_peers.AuthorsEngine,
        GENAI: bench_peers.GenaiEngine,
    }
    with needs_extra("export"):
        return kinds[job.engine](job)


def measure(job: Job) -> EngineRun:
    """Opens the engine, warms it up, asks everything in every mode, modes in turn."""
    with contextlib.closing(open_engine(job)) as engine:
        for mode in job.modes:
            first = job.questions[0]
            short = Question(first.ids, first.messages, WARM_UP_TOKENS, first.stop_token_ids, answer=first.answer)
            engine.answer(mode, 0, short)
        answers = []
        for number, question in enumerate(job.questions):
            turn = (number + job.turn) % len(job.modes)
            for mode in job.modes[turn:] + job.modes[:turn]:
                if question.context_tokens is None or mode.scripted_tokens is None:
                    answers.append(engine.answer(mode, number, question))
        return EngineRun(answers, engine.precision, engine.versions, own_peak_bytes(), device_memory_bytes())


def device_memory_bytes(pid: int | None = None) -> int | None:
    """Memory of a process on all GPUs; None where nvidia-smi does not tell (no GPU, or a Jetson)."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-compute-apps=pid,used_gpu_memory", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    return parse_device_memory(done.stdout, os.getpid() if pid is None else pid)


def parse_device_memory(text: str, pid: int) -> int | None:
    """Bytes of a process in nvidia-smi's list of processes and MiB; None where it is not in it."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    used = [int(row[1]) << 20 for row in rows if len(row) == 2 and row[0] == str(pid) and row[1].isdigit()]
    return sum(used) if used else None


@click.command(cls=DFlashCommand)
@click.argument("job", type=click.Path(path_type=Path))
@click.argument("result", type=click.Path(path_type=Path))
def main(job: Path, result: Path) -> None:
    """Measures what JOB says and writes RESULT."""
    write_json(result, measure(read_job(job)))


if __name__ == "__main__":
    main()

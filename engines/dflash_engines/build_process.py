"""Runs a TensorRT build in a process of its own: watched, limited in memory, and gone when anything fails."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from dflash_engines.tensorrt_build import BuildOrder, BuildOutcome
from dflash_runtime.errors import EngineError

_POLL_S = 0.05


@dataclasses.dataclass(frozen=True)
class FinishedBuild:
    """A build that wrote its engine."""

    outcome: BuildOutcome
    peak_bytes: int
    """Most memory the process had resident, 0 where the system does not say."""
    seconds: float


def run_build(order: BuildOrder, max_memory_bytes: int | None, progress: Callable[[int], None]) -> FinishedBuild:
    """Builds an engine; on any failure its file is removed.

    Args:
        order: What to build.
        max_memory_bytes: The process is stopped when more than this is resident; None for no limit.
        progress: Called with thousandths done.

    Raises:
        EngineError: TensorRT refused or failed, ended without a word, or took more memory than allowed.
    """
    started = time.perf_counter()
    argv = [sys.executable, "-m", "dflash_engines.tensorrt_build"]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    watch = _MemoryWatch(process, max_memory_bytes)
    errors: list[str] = []
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    drain = threading.Thread(target=lambda stream=process.stderr: errors.extend(stream), daemon=True)
    drain.start()
    outcome: BuildOutcome | None = None
    try:
        with contextlib.suppress(BrokenPipeError):  # it died at once; its exit status says so below
            process.stdin.write(json.dumps(dataclasses.asdict(order)))
            process.stdin.close()
        for line in process.stdout:
            message = json.loads(line)
            if "permille" in message:
                progress(message["permille"])
            else:
                outcome = BuildOutcome(**message["outcome"])
        process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        watch.stop()
        drain.join()
        failure = _failure(outcome, process.returncode, watch, errors)
        if failure is not None:
            Path(order.engine_path).unlink(missing_ok=True)
    if failure is not None or outcome is None:
        raise EngineError(f"{order.flavour} built no engine from {Path(order.onnx_path).name}: {failure}.")
    return FinishedBuild(outcome, watch.peak_bytes, time.perf_counter() - started)


class _MemoryWatch:
    """Samples what a process has resident and kills it when it is more than allowed."""

    def __init__(self, process: subprocess.Popen[str], limit_bytes: int | None) -> None:
        self._process = process
        self._limit_bytes = limit_bytes
        self._done = threading.Event()
        self.peak_bytes = 0
        self.exceeded = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(_POLL_S) and self._process.poll() is None:
            self.peak_bytes = max(self.peak_bytes, _resident_bytes(self._process.pid))
            if self._limit_bytes is not None and self.peak_bytes > self._limit_bytes:
                self.exceeded = True
                self._process.kill()


def _resident_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return 0
    found = [line.split() for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(found[0][1]) * 1024 if found else 0


def _failure(outcome: BuildOutcome | None, status: int, watch: _MemoryWatch, errors: list[str]) -> str | None:
    if watch.exceeded:
        return (
            f"the build took {watch.peak_bytes >> 20} MiB of memory and is allowed {(watch._limit_bytes or 0) >> 20} "
            "MiB. Allow more with --max-build-memory, or give fewer block sizes"
        )
    if outcome is not None and outcome.error is None and status == 0:
        return None
    if outcome is not None and outcome.error is not None:
        return outcome.error.rstrip(".")
    words = "".join(errors).strip().splitlines()
    last = f" (last words: {words[-1]})" if words else ""
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    return f"the build process {how}{last}"

"""Checks the export of every causal language model Transformers has, each at toy size.

    python -m dflash_tools.architectures [--only CLASS,..] [--json FILE] [--markdown FILE] [--jobs N] [--resume]

Each architecture must end `exact` (the graph says what PyTorch says) or `refused` by name with a reason.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path

from dflash_tools.architecture_check import Verdict, check_architecture, config_classes
from dflash_tools.architecture_table import as_markdown

SECONDS_EACH = 600.0
BATCH = 12
"""Architectures a process takes, to save imports."""


def main() -> int:
    """Runs the gate; the exit status is 1 when an architecture is wrong or crashed."""
    arguments = _parse()
    classes = config_classes()
    if arguments.worker:
        for name in arguments.only.split(","):
            print(json.dumps(dataclasses.asdict(check_architecture(classes[name]))), flush=True)
        return 0
    names = arguments.only.split(",") if arguments.only else list(classes)
    done: dict[str, Verdict] = {}
    if arguments.resume and arguments.json and arguments.json.exists():
        done = {v["config"]: Verdict(**v) for v in json.loads(arguments.json.read_text())}
    wanted = [name for name in names if arguments.only or name not in done]
    batches = [wanted[i : i + BATCH] for i in range(0, len(wanted), BATCH)]
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for future in concurrent.futures.as_completed([pool.submit(_run_batch, batch) for batch in batches]):
            done |= {verdict.config: verdict for verdict in future.result()}
            if arguments.json:
                rows = [dataclasses.asdict(done[name]) for name in sorted(done)]
                arguments.json.write_text(json.dumps(rows, indent=1))
    if arguments.markdown:
        arguments.markdown.write_text(as_markdown(list(done.values())))
    counts = {s: sum(v.status == s for v in done.values()) for s in ("exact", "refused", "WRONG", "crashed")}
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    return int(counts["WRONG"] + counts["crashed"] > 0)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dflash_tools.architectures", description=__doc__)
    parser.add_argument("--only", default="", help="configuration classes, separated by commas")
    parser.add_argument("--json", type=Path, help="where the verdicts are kept")
    parser.add_argument("--markdown", type=Path, help="where the table goes")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--resume", action="store_true", help="keep the verdicts of --json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _run_batch(names: list[str]) -> list[Verdict]:
    """Checks architectures in a process of their own; one that hangs or dies costs only itself."""
    verdicts: list[Verdict] = []
    while len(verdicts) < len(names):
        left = names[len(verdicts) :]
        command = [sys.executable, "-m", "dflash_tools.architectures", "--worker", "--only", ",".join(left)]
        environment = {"OMP_NUM_THREADS": "2", **os.environ}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        ) as worker:
            found = _read_verdicts(worker, len(left))
        verdicts += found
        for verdict in found:
            print(f"{verdict.config:32} {verdict.status:8} {verdict.worst:.1e} {verdict.reason[:220]}", flush=True)
        if len(found) < len(left):
            name = left[len(found)]
            verdicts.append(Verdict(name, "", "", "crashed", f"no verdict within {SECONDS_EACH:.0f} s or process died"))
            print(f"{name:32} crashed  {verdicts[-1].reason}", flush=True)
    return verdicts


def _read_verdicts(worker: subprocess.Popen[str], count: int) -> list[Verdict]:
    assert worker.stdout is not None
    found: list[Verdict] = []
    deadline = time.monotonic() + SECONDS_EACH
    with selectors.DefaultSelector() as selector:
        selector.register(worker.stdout, selectors.EVENT_READ)
        while len(found) < count and selector.select(max(0.0, deadline - time.monotonic())):
            line = worker.stdout.readline()
            if not line:
                break
            found.append(Verdict(**json.loads(line)))
            deadline = time.monotonic() + SECONDS_EACH
    if len(found) < count:
        worker.kill()
    return found


if __name__ == "__main__":
    sys.exit(main())

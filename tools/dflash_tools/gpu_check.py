"""Everything this program can say about a GPU, in one run: `tools/gpu_check`.

Each stage has a process and a time budget of its own. Its result is done, failed or skipped, with the reason; nothing
ends the whole. Results go to `$OUT/gpu_check.json`, or to `./gpu_check.json`, after every stage.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

from dflash_runtime.bundle import write_atomically
from dflash_tools.gpu_check_device import FOLDER_VARIABLE
from dflash_tools.gpu_check_pieces import FOLDER, MODULES, join_packages
from dflash_tools.gpu_check_stage import Outcome, Stage, answer_for, run_stages, table, write_outcomes

_DISTRIBUTION = "dflash-export"
LIMIT_S = 390.0
"""For all stages together; with the joining of packages before them, 8 minutes."""
STAGES = {
    "machine": ("gpu_check_small", "machine", 40.0),
    "bandwidth": ("gpu_check_speed", "bandwidth", 40.0),
    "tiny_golden": ("gpu_check_small", "tiny_golden", 60.0),
    "tiny_identity": ("gpu_check_small", "tiny_identity", 60.0),
    "qwen2_7b": ("gpu_check_speed", "qwen2_7b", 150.0),
    "qwen2_7b_cuda_graph": ("gpu_check_speed", "qwen2_7b_cuda_graph", 90.0),
    "pytorch": ("gpu_check_speed", "pytorch", 90.0),
    "tensorrt": ("gpu_check_small", "tensorrt", 60.0),
    "tiny_built_here": ("gpu_check_small", "tiny_built_here", 60.0),
}
"""Stage -> module, function, seconds; the most telling first."""


def main(arguments: list[str] | None = None) -> None:
    """Runs all stages, or as a child one."""
    parser = argparse.ArgumentParser(prog="tools/gpu_check", description=__doc__)
    parser.add_argument("--pieces", type=Path, default=FOLDER, help="what gpu_check_pieces made [default: %(default)s]")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "."), help="folder of the result")
    parser.add_argument("--only", action="append", choices=list(STAGES), help="one stage; repeatable")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for all stages [default: %(default)s]")
    parser.add_argument("--execute", nargs=2, metavar=("STAGE", "ANSWER"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.execute:
        execute(*options.execute)
        return
    site, words = _join(options.pieces)
    command = (sys.executable, "-m", "dflash_tools.gpu_check", "--execute")
    stages = [Stage(name, STAGES[name][2], (*command, name)) for name in options.only or STAGES]
    started = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    facts = {"started": started, "packages_taken_along": words}
    path = options.out / "gpu_check.json"
    print(f"packages taken along: {words}", flush=True)

    def report(outcomes: list[Outcome]) -> None:
        write_outcomes(path, outcomes, facts)
        print(table(outcomes[-1:])[0], flush=True)

    outcomes = run_stages(stages, options.limit, report, environment(site, options.pieces))
    print(f"\n{path}")
    for line in table(outcomes):
        print(line)


def execute(name: str, answer: str) -> None:
    """A child's work: one stage, its answer to a file."""
    module, function, _ = STAGES[name]

    def work(data: dict[str, Any]) -> None:  # an import that fails is the stage's result too
        getattr(importlib.import_module(f"dflash_tools.{module}"), function)(data)

    told = answer_for(work)
    write_atomically(Path(answer), json.dumps(told, default=str))


def environment(site: Path | None, pieces: Path) -> dict[str, str]:
    """Of the stages: what was taken along comes first, and CUDA's libraries of pip packages are found."""
    found = dict(os.environ)
    paths = [site, pieces / MODULES, state_version(pieces)]
    python = [str(path.resolve()) for path in paths if path is not None and path.is_dir()]
    found["PYTHONPATH"] = os.pathsep.join([*python, *filter(None, [found.get("PYTHONPATH")])])
    folders = [path for root in map(Path, sys.path) for path in sorted(root.glob("nvidia/*/lib"))]
    libraries = [*map(str, folders), *filter(None, [found.get("LD_LIBRARY_PATH")])]
    if libraries:
        found["LD_LIBRARY_PATH"] = os.pathsep.join(libraries)
    found[FOLDER_VARIABLE] = str(pieces.resolve())
    return found


def state_version(pieces: Path) -> Path | None:
    """Metadata for a checkout that is not installed: what is built states the version that built it.

    Returns:
        The folder for Python's path; None where the program is installed.
    """
    try:
        importlib.metadata.version(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
        version = project.partition('version = "')[2].partition('"')[0]
        folder = pieces / "metadata"
        described = folder / f"{_DISTRIBUTION.replace('-', '_')}-{version}.dist-info" / "METADATA"
        described.parent.mkdir(parents=True, exist_ok=True)
        text = f"Metadata-Version: 2.1\nName: {_DISTRIBUTION}\nVersion: {version}\n"
        write_atomically(described, text)
        return folder
    return None


def _join(pieces: Path) -> tuple[Path | None, str]:
    try:
        return join_packages(pieces)
    except Exception as error:  # the stages say what they lack
        return None, f"they cannot be joined: {type(error).__name__}: {error}"


if __name__ == "__main__":
    main()

"""Builds that are killed at random moments and started again, in children of a process that has imported everything.

    python killed_builds.py CHECKPOINTS FOLDER MOMENTS MODE PRECISION

Prints one line for each moment: where the build was killed, and whether the bundle that came of it in the end has the
same bytes as that of a build nobody killed.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from dflash_export.build_plan import BuildOptions
from dflash_tools import pipeline


def start(options: BuildOptions, out: Path) -> int:
    """A child that builds; it ends with 0 when the bundle is there."""
    pid = os.fork()
    if pid == 0:
        try:
            pipeline.build(options, out, "ort-cpu", lambda *_: None)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", flush=True)
            os._exit(1)
        os._exit(0)
    return pid


def bytes_of(folder: Path) -> dict[str, str]:
    """Hash of every file of a bundle."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def main() -> None:
    """See the module."""
    checkpoints, folder = Path(sys.argv[1]), Path(sys.argv[2])
    moments, mode, precision = int(sys.argv[3]), sys.argv[4], sys.argv[5]
    options = BuildOptions(
        str(checkpoints / "target"), str(checkpoints / "drafter"), precision=precision, weights_copy=mode, gate="layers"
    )
    out = folder / "b"
    began = time.monotonic()
    assert os.waitpid(start(options, out), 0)[1] == 0
    whole_s, expected = time.monotonic() - began, bytes_of(out)
    rng = random.Random(20)
    for number in range(moments):
        shutil.rmtree(out)
        after_s = rng.uniform(0, whole_s)
        pid = start(options, out)
        time.sleep(after_s)
        os.kill(pid, signal.SIGKILL)
        ended = os.waitpid(pid, 0)[1]
        left = sorted(path.name for path in folder.glob(".b.partial/stages/*"))
        assert out.exists() == (ended == 0), "a bundle has its name though its build was killed"
        assert os.waitpid(start(options, out), 0)[1] == 0
        same = bytes_of(out) == expected and [path.name for path in folder.iterdir()] == ["b"]
        moment = f"killed after {after_s:.1f} of {whole_s:.1f} s with {len(left)} records"
        print(f"{number}: {moment}: same={same}", flush=True)
        assert same


if __name__ == "__main__":
    main()

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


def same_bytes(folder: Path, expected: dict[str, str]) -> bool:
    """Whether a bundle has the same files with the same content."""
    return bytes_of(folder) == expected


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
    number = 0
    while number < moments:
        shutil.rmtree(out)
        after_s = rng.uniform(0, whole_s)
        pid = start(options, out)
        time.sleep(after_s)
        os.kill(pid, signal.SIGKILL)
        ended = os.waitpid(pid, 0)[1]
        if ended == 0:  # it was faster than the first: this moment does not count
            whole_s = after_s
            continue
        left = sorted(path.name for path in folder.glob(".b.partial/stages/*"))
        assert not out.exists() or same_bytes(out, expected), "a bundle that is not whole has its name"
        assert os.waitpid(start(options, out), 0)[1] == 0
        same = same_bytes(out, expected) and [path.name for path in folder.iterdir()] == ["b"]
        moment = f"killed after {after_s:.1f} of {whole_s:.1f} s with {len(left)} records"
        print(f"{number}: {moment}: same={same}", flush=True)
        assert same
        number += 1


if __name__ == "__main__":
    main()

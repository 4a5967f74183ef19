"""Builds that are killed at random moments and started again, in children of a process that has imported everything.

    python tests/cross/killed_builds.py CHECKPOINTS FOLDER [--moments 20] [--weights-copy copy|link] [--precision fp32]
                                        [--quantize keep|int8|int4]

CHECKPOINTS holds `target` and `drafter`; FOLDER is empty. Prints one line for each moment: where the build was killed,
and whether the bundle that came of it in the end has the same bytes as that of a build nobody killed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

from dflash_export.build_plan import BuildOptions
from dflash_export.quantization import quantize_options
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


def read_arguments() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--weights-copy", choices=["copy", "link"], default="copy")
    parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp32")
    parser.add_argument("--quantize", choices=["keep", "int8", "int4"], default="keep")
    return parser.parse_args()


def require_mode(out: Path, arguments: argparse.Namespace) -> None:
    """The bundle is what the test is about: one with hard links, one with quantised weights."""
    linked = any(path.stat().st_nlink > 1 for path in (out / "weights").iterdir())
    assert linked == (arguments.weights_copy == "link"), "hard links where none were asked for, or none"
    quantised = bool(json.loads((out / "bundle.json").read_text(encoding="utf-8"))["quantized"])
    assert quantised == (arguments.quantize != "keep"), "quantised weights where none were asked for, or none"


def main() -> None:
    """See the module."""
    arguments = read_arguments()
    checkpoints, folder, kind = arguments.checkpoints, arguments.folder, arguments.quantize
    options = BuildOptions(
        str(checkpoints / "target"), str(checkpoints / "drafter"), precision=arguments.precision,
        weights_copy=arguments.weights_copy, gate="layers", quantize=quantize_options(kind, kind, kind),
    )  # fmt: skip
    out = folder / "b"
    began = time.monotonic()
    assert os.waitpid(start(options, out), 0)[1] == 0
    whole_s, expected = time.monotonic() - began, bytes_of(out)
    require_mode(out, arguments)
    rng = random.Random(20)
    number = 0
    while number < arguments.moments:
        ended_by_itself, moment = kill_and_resume(options, out, rng.uniform(0, whole_s), expected)
        if ended_by_itself:  # it was faster than the first: this moment does not count
            whole_s = float(moment)
            continue
        print(f"{number}: killed after {moment} of {whole_s:.1f} s: same=True", flush=True)
        number += 1


def kill_and_resume(
    options: BuildOptions, out: Path, after_s: float, expected: dict[str, str]
) -> tuple[bool, str]:
    """Kills a build after so many seconds and starts it again.

    Args:
        options: What is built.
        out: Where.
        after_s: Seconds until the signal.
        expected: Hashes of the bundle nobody killed.

    Returns:
        Whether the build was finished before the signal, and the moment: its seconds and the records it left.
    """
    shutil.rmtree(out)
    pid = start(options, out)
    time.sleep(after_s)
    os.kill(pid, signal.SIGKILL)
    if os.waitpid(pid, 0)[1] == 0:
        return True, f"{after_s}"
    left = len(list(out.parent.glob(".b.partial/stages/*")))
    assert not out.exists() or bytes_of(out) == expected, "a bundle that is not whole has its name"
    assert os.waitpid(start(options, out), 0)[1] == 0
    assert bytes_of(out) == expected, f"killed after {after_s:.1f} s with {left} records: other bytes"
    assert [path.name for path in out.parent.iterdir()] == ["b"]
    return False, f"{after_s:.1f} s with {left} records"


if __name__ == "__main__":
    main()

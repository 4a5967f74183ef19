"""The runtime stays small enough to read: lines of what a session on the CPU imports, and of the whole package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import dflash_runtime

PACKAGE = Path(dflash_runtime.__file__).parent
CPU_SESSION_LINES = 1650
PACKAGE_LINES = 2980

GENERATE = """
import sys
from dflash_runtime import GenerationConfig, Session
with Session.open(sys.argv[1], threads=1) as session:
    assert session.generate([1, 2, 3], GenerationConfig(max_new_tokens=4)).token_ids
names = [m.__file__ for n, m in sys.modules.items() if n.partition(".")[0] == "dflash_runtime"]
print(*names, sep="\\n")
"""


def lines_of(files: list[Path]) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def test_what_a_session_on_the_cpu_imports(tiny: Path) -> None:
    done = subprocess.run([sys.executable, "-c", GENERATE, str(tiny)], capture_output=True, text=True, check=True)
    files = [Path(line) for line in done.stdout.split()]
    names = {file.stem for file in files}
    assert {"ort_cpu", "decode", "bundle", "session"} <= names
    assert not any(name.startswith(("device", "cuda", "tensorrt")) for name in names), names
    assert lines_of(files) <= CPU_SESSION_LINES


def test_the_whole_package() -> None:
    assert lines_of(sorted(PACKAGE.rglob("*.py"))) <= PACKAGE_LINES

"""The runtime stays small enough to read: lines of what a session on the CPU imports, and of all a session can use."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path

import dflash_runtime

_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
PACKAGE = Path(dflash_runtime.__file__).parent
CPU_SESSION_LINES = 1500
PACKAGE_LINES = 2200

GENERATE = """
import sys
from dflash_runtime import GenerationConfig, Session
with Session.open(sys.argv[1], threads=1) as session:
    assert session.generate([1, 2, 3], GenerationConfig(max_new_tokens=4)).token_ids
names = [m.__file__ for n, m in sys.modules.items() if n.partition(".")[0] == "dflash_runtime"]
print(*names, sep="\\n")
"""


def lines_of(files: list[Path]) -> int:
    """Lines of code: neither blank nor of comments and docstrings alone."""
    return sum(len(_lines(file.read_text(encoding="utf-8"))) for file in files)


def _lines(source: str) -> set[int]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    kept = {line for token in tokens if token.type not in _NO_CODE for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", [])
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            kept -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return kept


def test_a_line_of_code_is_counted_once() -> None:
    doc = '    """More.\n\n    And more."""'
    source = f'"""Doc."""\n\n# why\ndef f(a):  # how\n{doc}\n    return {{\n        a: "x",\n    }}\n'
    assert _lines(source) == {4, 8, 9, 10}


def test_what_a_session_on_the_cpu_imports(tiny: Path) -> None:
    done = subprocess.run([sys.executable, "-c", GENERATE, str(tiny)], capture_output=True, text=True, check=True)
    files = [Path(line) for line in done.stdout.splitlines()]
    names = {file.stem for file in files}
    assert {"ort_cpu", "decode", "bundle", "session"} <= names
    assert not any(name.startswith(("device", "cuda", "tensorrt")) for name in names), names
    assert lines_of(files) < CPU_SESSION_LINES


CONTRACT = {"value_ranges.py"}
"""What export tells those that make engines. It lies here because both may import it; no session does."""


def test_the_whole_package() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    imported = {node.module for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
                if isinstance(node, ast.ImportFrom)}  # fmt: skip
    assert not {f"dflash_runtime.{name.removesuffix('.py')}" for name in CONTRACT} & imported
    assert lines_of([file for file in files if file.name not in CONTRACT]) < PACKAGE_LINES

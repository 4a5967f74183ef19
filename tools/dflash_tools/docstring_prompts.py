"""Prompts for training a drafter on code: functions of installed packages, to be written from signature and docstring.

The standard library and any installed package are public data that every machine with Python has. The prompts have
the form of HumanEval's as the authors' benchmark asks them; none of its functions is among them.
"""

from __future__ import annotations

import ast
import random
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from dflash_runtime.errors import PromptError
from dflash_tools.acceptance_prompts import SETS

DOCSTRING_LENGTHS = range(30, 501)
LONGEST_SIGNATURE = 120
_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "_vendor"}


def source_folders(packages: Sequence[str]) -> list[Path]:
    """The standard library, and installed packages by their import names.

    Raises:
        PromptError: a package is not installed.
    """
    paths = sysconfig.get_paths()
    folders = [Path(paths["stdlib"])]
    for name in packages:
        folder = Path(paths["purelib"]) / name
        if not folder.is_dir():
            raise PromptError(f"{name} is no package in {folder.parent}. Install it, or leave it out.")
        folders.append(folder)
    return folders


def docstring_prompts(folders: Iterable[Path], count: int, seed: int, without: Iterable[str] = ()) -> list[str]:
    """Prompts drawn from all functions with a docstring of middle length.

    Args:
        folders: With Python sources.
        count: Most prompts.
        seed: The same seed and sources give the same prompts.
        without: Names of functions that must not be asked for.
    """
    barred = set(without)
    found: dict[str, str] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            if _LEFT_OUT & set(path.relative_to(folder).parts[:-1]):
                continue
            for name, text in _functions(path):
                if name not in barred:
                    found.setdefault(text.partition('"""')[2], text)  # one docstring, one prompt
    chosen = list(found.values())
    random.Random(seed).shuffle(chosen)
    return [SETS["humaneval"][1].format(text=text) for text in chosen[:count]]


def _functions(path: Path) -> Iterator[tuple[str, str]]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):  # the standard library holds files that are broken on purpose
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
            text = _as_asked(node)
            if text is not None:
                yield node.name, text


def _as_asked(node: ast.FunctionDef) -> str | None:
    """Signature and docstring as HumanEval writes them; None for a function that tells too little or too much."""
    docstring = ast.get_docstring(node)
    if docstring is None or len(docstring) not in DOCSTRING_LENGTHS or '"""' in docstring:
        return None
    arguments = node.args
    own = [argument for argument in arguments.args if argument.arg not in ("self", "cls")]
    if not own or len(arguments.defaults) > len(arguments.posonlyargs) + len(own):
        return None
    arguments.args = own
    signature = ast.unparse(arguments)
    if len(signature) > LONGEST_SIGNATURE:
        return None
    returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    body = textwrap.indent(docstring, "    ").strip()
    return f'def {node.name}({signature}){returns}:\n    """ {body}\n    """\n'

"""What a build has finished so far, so that one that was killed goes on where it was.

    .NAME.partial/plan.json     what is being built, as one hash
    .NAME.partial/stages/       one record for each finished stage
    .NAME.partial/bundle/       the bundle as far as it is

Everything in `bundle` that no stage has finished is made anew. Nothing here depends on the time or the process, so the
bundle of an interrupted build is that of an uninterrupted one, byte for byte.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import dflash_runtime
from dflash_runtime.bundle import write_atomically

_PACKAGES = ("torch", "transformers", "onnx", "onnxscript", "onnx-ir", "onnxruntime")


class BuildStages:
    """Records of finished stages; each is JSON data under a name."""

    def __init__(self, folder: Path | None) -> None:
        """Opens the records.

        Args:
            folder: Where they lie; None keeps none.
        """
        self._folder = folder

    def load(self, name: str) -> Any:
        """What a stage left, None where it has not finished."""
        path = self._path(name)
        if path is None or not path.is_file():
            return None
        return json.loads(path.read_text(encoding="utf-8"))

    def save(self, name: str, data: Any) -> None:
        """Records that a stage has finished; whoever reads the record needs nothing but it."""
        path = self._path(name)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(data))

    def file(self, name: str) -> Path | None:
        """A place for what is no JSON data and does not belong to the bundle."""
        if self._folder is None:
            return None
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / name

    def _path(self, name: str) -> Path | None:
        return None if self._folder is None else self._folder / f"{name}.json"


def open_stages(staging: Path, plan_hash: str) -> tuple[Path, BuildStages, str]:
    """Goes on in a folder that a killed build of the same plan left, or begins in an empty one.

    Args:
        staging: The folder, held by this process.
        plan_hash: From `hash_plan`.

    Returns:
        The bundle's folder, the stages, and a word for the user, empty for a build that begins in an empty folder.
    """
    plan_file, stages, root = staging / "plan.json", staging / "stages", staging / "bundle"
    found = json.loads(plan_file.read_text(encoding="utf-8")).get("plan") if plan_file.is_file() else None
    note = ""
    if found == plan_hash:
        note = "a build of the same that was interrupted is continued"
        _remove_all_but(root, {"weights"})
    else:
        if found is not None:
            note = "an interrupted build of something else lay here and was begun anew"
        _remove_all_but(staging, set())
        write_atomically(plan_file, json.dumps({"plan": plan_hash}))
    root.mkdir(exist_ok=True)
    return root, BuildStages(stages), note


def _remove_all_but(folder: Path, kept: set[str]) -> None:
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink() and path.name not in kept:
            shutil.rmtree(path)
        elif path.name not in kept:
            path.unlink()


def hash_plan(facts: Any, files: Iterable[Path]) -> str:
    """One hash of everything that decides what a build makes.

    Args:
        facts: JSON data: options and command line.
        files: The checkpoints' files; size, time and place of each stand for its content.
    """
    state = [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in sorted(files)]
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    text = json.dumps([facts, state, versions, _hash_of_this_program()], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _hash_of_this_program() -> str:
    """The sources of this program: another version may make other graphs, under the same number or not."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for folder in (here, Path(dflash_runtime.__file__).parent, *_engines()):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _engines() -> list[Path]:
    """The package that lowers graphs, found by name: it is not to be imported from here."""
    import importlib.util

    spec = importlib.util.find_spec("dflash_engines")
    return [Path(place) for place in (spec.submodule_search_locations or [])] if spec is not None else []

"""`engines/<backend>/engine.json`: what the lowered graphs in that folder were made from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from dflash_runtime.bundle import Bundle, FileFacts, compare_files, read_record
from dflash_runtime.errors import BundleError, EngineError
from dflash_runtime.window_rings import Ring

ENGINE_RECORD_NAME = "engine.json"
"""Written last of all files, so that a record means a complete engine."""
Kind = TypeVar("Kind", bound="EngineRecord")


@dataclasses.dataclass(frozen=True)
class EngineRecord:
    """What every `engine.json` says."""

    SCHEMA_VERSION = 0
    """Each kind has its own."""
    schema_version: int
    backend: str
    source: dict[str, str]
    """Portable graph file -> the sha256 it had when it was lowered."""
    files: dict[str, FileFacts]
    """The engine's own files, named relative to its folder."""
    execution_precision: str
    """fp32, fp16 or bf16."""
    versions: dict[str, str]
    """Packages that made it."""
    rings: dict[str, Ring]
    """Drafter caches of constant size; the others are as long as the context."""

    @classmethod
    def read(cls: type[Kind], folder: Path, remedy: str) -> Kind:
        """Reads the record in `folder` and compares the engine's files with it.

        `remedy` is the command that makes the engine, for messages.

        Raises:
            EngineError: no record, an unreadable one, or files that are missing, short or altered.
        """
        path = folder / ENGINE_RECORD_NAME
        if not path.is_file():
            raise EngineError(f"There is no engine in {folder} ({path.name} is missing). {remedy}")
        try:
            record = read_record(cls, path, cls.SCHEMA_VERSION)
        except BundleError as error:
            raise EngineError(f"{path} cannot be read: {error} {remedy}") from error
        problems, _ = compare_files({name: folder / name for name in record.files}, record.files, {})
        if problems:
            raise EngineError(f"The engine in {folder} cannot be used: {'; '.join(problems)}. {remedy}")
        return record


@dataclasses.dataclass(frozen=True)
class HostEngineRecord(EngineRecord):
    """That of lowered graphs for `ort-cpu`."""

    SCHEMA_VERSION = 3

    given_weights: list[str]
    """Those that all sessions share: what target and drafter both read, and what must be widened."""
    folded_weights: dict[str, list[str]]
    """File -> weights from which its constants are computed when it is opened."""
    upcast: bool
    """The bundle's weights are narrower than `execution_precision` and are widened when a session opens."""


def engine_folder(bundle: Bundle, backend: str) -> Path:
    """Where the engines of a backend lie."""
    return bundle.path / "engines" / backend


def open_engine(bundle: Bundle, backend: str) -> HostEngineRecord:
    """Reads the record of lowered graphs for the CPU and checks it against the files and the bundle's graphs.

    Raises:
        EngineError: no engine, one that is incomplete or altered, or one made from other graphs.
    """
    folder = engine_folder(bundle, backend)
    remedy = f"Run: dflash-export engines {bundle.path} --backend {backend}"
    record = HostEngineRecord.read(folder, remedy)
    graphs = bundle.manifest.graph_files().values()
    problems = [f"it does not list {name}" for name in graphs if name not in record.files]
    problems += source_problems(bundle, record.source)
    block = max(bundle.manifest.block_sizes)
    problems += [f"{name} is a ring of {ring.rows} rows, a block of {block} needs {ring.window_tokens + block - 1}"
                 for name, ring in record.rings.items() if ring.rows < ring.window_tokens + block - 1]  # fmt: skip
    if record.backend != backend:
        problems.append(f"it was made for {record.backend}, not {backend}")
    if problems:
        raise EngineError(f"The engine in {folder} cannot be used: {'; '.join(problems)}. {remedy}")
    return record


def source_problems(bundle: Bundle, source: Mapping[str, str]) -> list[str]:
    """Which graphs an engine was made from that are not the bundle's, in words."""
    now = {name: facts.sha256 for name, facts in bundle.manifest.files.items()}
    pairs = [(name, source.get(name, "none"), now.get(name, "none")) for name in bundle.manifest.graph_files().values()]
    return [f"it was made from {name} {made[:12]}, the bundle has {here[:12]}"
            for name, made, here in pairs if made != here]  # fmt: skip

"""Engines built before, by what they are: a fine-tune of a shape gets the engine of the shape without a build."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

from dflash_runtime.bundle import cache_root, decode, sha256_of, write_atomically
from dflash_runtime.device_engine import GraphEngine
from dflash_runtime.errors import BundleError


class EngineCache:
    """A folder of engines. It may be deleted at any time."""

    def __init__(self) -> None:
        self._root = cache_root() / "built-engines"

    def fetch(self, key: str, target: Path) -> GraphEngine | None:
        """Copies the engine of `key` to `target`; None where there is none, or where it was altered."""
        try:
            data = json.loads(self._facts(key).read_text(encoding="utf-8"))
            engine = decode(GraphEngine, data["engine"], str(self._facts(key)))
            shutil.copyfile(self._engine(key), target)
        except (OSError, ValueError, KeyError, TypeError, BundleError):
            return None  # nothing here, or nothing that can be read: the engine is built
        if sha256_of(target) != data.get("sha256"):
            target.unlink()
            return None
        assert isinstance(engine, GraphEngine)
        return engine

    def keep(self, key: str, built: Path, engine: GraphEngine) -> None:
        """Keeps a copy of an engine, by a hard link where the file system allows."""
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            partial = self._root / f".{key}.{os.getpid()}.partial"
            partial.unlink(missing_ok=True)
            try:
                os.link(built, partial)
            except OSError:
                shutil.copyfile(built, partial)
            partial.replace(self._engine(key))
            facts = {"engine": dataclasses.asdict(engine), "sha256": sha256_of(built)}
            write_atomically(self._facts(key), json.dumps(facts))
        except OSError:
            return  # a full or read-only home costs another build some day, nothing else

    def _engine(self, key: str) -> Path:
        return self._root / f"{key}.engine"

    def _facts(self, key: str) -> Path:
        return self._root / f"{key}.json"

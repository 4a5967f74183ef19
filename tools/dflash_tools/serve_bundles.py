"""The bundles a server is started with, by name."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

from dflash_runtime.bundle import MANIFEST_NAME, Bundle
from dflash_runtime.errors import DFlashError
from dflash_runtime.generation import GenerationConfig
from dflash_tools.bundle_memory import session_memory
from dflash_tools.engine_place import find_engine_place
from dflash_tools.sizes import bytes_text


@dataclasses.dataclass(frozen=True)
class ServedBundle:
    """What is known of a bundle before it is loaded."""

    name: str
    path: Path
    memory_bytes: int
    """Weights, caches and engine files of a session, by the bundle's facts."""
    fingerprint: str
    """Changes with the bundle, as far as its manifest tells."""
    created_s: int
    """When the manifest was written, in seconds since 1970."""


def find_bundles(
    given: Sequence[str], backend: str, budget_bytes: int | None, config: GenerationConfig
) -> list[ServedBundle]:
    """Reads the manifest of each bundle.

    Args:
        given: Folders, each alone (its last part is the name) or as NAME=FOLDER.
        backend: What will execute them.
        budget_bytes: Memory for loaded bundles; None: no limit.
        config: Options that all answers will have.

    Raises:
        PromptError: a bundle cannot be used with these options.
        BundleError: no bundle there.
        EngineError: it has no engines for the backend.
        DFlashError: two of one name, or one that does not fit the budget.
    """
    found: dict[str, ServedBundle] = {}
    for text in given:
        name, path = _name_and_path(text)
        if name in found:
            raise DFlashError(f"Both {found[name].path} and {path} are called {name!r}. Name them, as OTHER={path}.")
        found[name] = _read(name, path, backend, config)
        needed = found[name].memory_bytes
        if budget_bytes is not None and needed > budget_bytes:
            raise DFlashError(f"{path} needs about {bytes_text(needed)} and --memory-budget is "
                              f"{bytes_text(budget_bytes)}. Raise it or leave the bundle out.")  # fmt: skip
    return list(found.values())


def _name_and_path(text: str) -> tuple[str, Path]:
    name, equals, folder = text.partition("=")
    if equals and name and "/" not in name and not Path(text).exists():
        return name, Path(folder)
    return Path(text).resolve().name, Path(text)


def _read(name: str, path: Path, backend: str, config: GenerationConfig) -> ServedBundle:
    bundle = Bundle.open(path)
    config.check(bundle.manifest)
    if not (path / "tokenizer" / "tokenizer.json").is_file():
        raise DFlashError(f"{path} has no tokenizer, so it cannot speak text. Build it from a checkpoint with one.")
    place = find_engine_place(bundle, backend)
    memory, manifest = session_memory(bundle, place.precision, place.ring_rows), path / MANIFEST_NAME
    needed = memory.weight_bytes + memory.kv_bytes + place.file_bytes
    sha256 = hashlib.sha256(manifest.read_bytes() + place.record_sha256.encode()).hexdigest()
    return ServedBundle(name, path, needed, f"dflash-{sha256[:12]}", int(manifest.stat().st_mtime))

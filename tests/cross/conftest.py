from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pairs import Pair, build_fully, export_quickly

Make = Callable[[Pair], Path]


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hash stamps of throw-away bundles stay out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all workers of a parallel run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "pairs"
    folder.mkdir(exist_ok=True)
    return folder


def _once(shared: Path, make: Callable[[Pair, Path], Path]) -> Make:
    """Makes each pair one time, whichever worker comes first."""

    def made(pair: Pair) -> Path:
        folder = shared / f"{pair.name}-{make.__name__}"
        with (shared / f".{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "ready").exists():
                make(pair, folder)
                (folder / "ready").touch()
        return folder / "bundle"

    return made


@pytest.fixture(scope="session")
def exported(shared_folder: Path) -> Make:
    """Pair -> bundle, exported and lowered without the gate; its checkpoints lie beside it. Treat it as read-only."""
    return _once(shared_folder, export_quickly)


@pytest.fixture(scope="session")
def built(shared_folder: Path) -> Make:
    """Pair -> bundle of the whole build; its checkpoints lie beside it. Treat it as read-only."""
    return _once(shared_folder, build_fully)

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pairs import Pair, build_fully, export_quickly

from dflash_runtime.bundle import Bundle

Make = Callable[[Pair], Path]
Once = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hash stamps of throw-away bundles stay out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def once(shared_folder: Path) -> Once:
    """(name, make) -> a folder that `make` filled one time, whichever worker came first. Treat it as read-only."""

    pairs = shared_folder / "pairs"
    pairs.mkdir(exist_ok=True)

    def folder_of(name: str, make: Callable[[Path], object]) -> Path:
        folder = pairs / name
        with (pairs / f".{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "ready").exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                (folder / "ready").touch()
        return folder

    return folder_of


@pytest.fixture(scope="session")
def exported(once: Once) -> Make:
    """Pair -> bundle, exported and lowered without the gate; its checkpoints lie beside it."""
    return lambda pair: once(f"{pair.name}-exported", lambda folder: export_quickly(pair, folder)) / "bundle"


@pytest.fixture(scope="session")
def built(once: Once) -> Make:
    """Pair -> bundle of the whole build; its checkpoints lie beside it."""
    return lambda pair: once(f"{pair.name}-built", lambda folder: build_fully(pair, folder)) / "bundle"


@pytest.fixture
def bundle_of(exported: Make, tmp_path: Path) -> Callable[[Pair], Bundle]:
    """A copy of the pair's bundle that a test may write to."""

    def copy(pair: Pair) -> Bundle:
        shutil.copytree(exported(pair), tmp_path / pair.name)
        return Bundle.open(tmp_path / pair.name)

    return copy


@pytest.fixture
def engines_are_kept(shared_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines another test has built are not built again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared_folder / "cache"))

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_bundle import Sizes, write_bundle

from dflash_runtime import Session


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hash stamps of throw-away bundles stay out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random pair; only three tokens can win, so that proposals are accepted now and then."""
    return write_bundle(tmp_path_factory.mktemp("bundles") / "tiny", Sizes(likely_tokens=3))


@pytest.fixture(scope="session")
def tiny_plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same target without a drafter."""
    return write_bundle(tmp_path_factory.mktemp("bundles") / "plain", Sizes(likely_tokens=3), drafter=False)


@pytest.fixture
def session(tiny: Path) -> Iterator[Session]:
    with Session.open(tiny, threads=1) as opened:
        yield opened

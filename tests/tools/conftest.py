from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_calls import Invoke, Launch, invoke_here, launch_apart
from tiny_bundle import Sizes, write_bundle


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hash stamps of throw-away bundles stay out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A random pair in a folder with a space in its name."""
    return write_bundle(tmp_path / "tiny pair", Sizes(likely_tokens=3))


@pytest.fixture
def plain_bundle(tmp_path: Path) -> Path:
    """The same target without a drafter."""
    return write_bundle(tmp_path / "plain", Sizes(likely_tokens=3), drafter=False)


@pytest.fixture
def invoke() -> Invoke:
    return invoke_here


@pytest.fixture
def launch() -> Launch:
    return launch_apart

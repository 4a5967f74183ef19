from __future__ import annotations

from pathlib import Path

import pytest
from small_bundle import write_small_bundle


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pair in portable form, fp32, without engines; hash stamps stay out of the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_small_bundle(tmp_path / "bundle", "fp32")

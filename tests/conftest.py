"""Lies here so that every test folder can import `tiny_models`; and what all tests of a run share."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all workers of a parallel run."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def _traces_are_kept(shared_folder: Path) -> None:
    """Builds trace no target and no drafter twice, in runs whose tests import the exporter."""
    if "dflash_export.traced_file" in sys.modules:
        from kept_traces import keep_traces, read_torchlib_once

        read_torchlib_once()
        keep_traces(shared_folder / "traces")


@pytest.fixture(scope="session", autouse=True)
def _imported_modules_are_no_garbage() -> None:
    """The collector looks at what a test makes, not over and over at all of torch."""
    gc.collect()
    gc.freeze()

"""A bundle appears whole or not at all, and what was there before is never lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_export.staging import check_output_place, staged_folder
from dflash_runtime.errors import OutputError


def test_success_moves_the_folder_and_replaces_an_older_bundle(tmp_path: Path) -> None:
    out = tmp_path / "模型 b"
    for text in ("one", "two"):
        with staged_folder(out) as root:
            (root / "bundle.json").write_text(text)
        assert (out / "bundle.json").read_text() == text
    assert [p.name for p in tmp_path.iterdir()] == [out.name]


def test_failure_leaves_the_older_bundle_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "b"
    with staged_folder(out) as root:
        (root / "bundle.json").write_text("old")
    with pytest.raises(ZeroDivisionError), staged_folder(out) as root:
        (root / "bundle.json").write_text("half")
        raise ZeroDivisionError
    assert (out / "bundle.json").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_foreign_folders_files_and_small_disks_are_refused_before_work(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(OutputError, match="exists and is not a bundle"):
        check_output_place(tmp_path / "mine", 1)
    with pytest.raises(OutputError, match="exists and is not a bundle"):
        check_output_place(tmp_path / "mine" / "thesis.txt", 1)
    with pytest.raises(OutputError, match="is a file"):
        check_output_place(tmp_path / "mine" / "thesis.txt" / "b", 1)
    with pytest.raises(OutputError, match=r"needs 1000000000\.00 GB"):
        check_output_place(tmp_path / "b", 10**18)
    check_output_place(tmp_path / "new" / "deep" / "b", 1)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_a_parent_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="cannot be written"), staged_folder(tmp_path / "file" / "b"):
        raise AssertionError("not reached")

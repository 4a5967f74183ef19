"""A target whose head has a bias runs alone, and is refused a drafter that would borrow half a head."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import write_drafter, write_target

from dflash_export.build import export_bundle
from dflash_export.build_plan import BuildOptions, plan_build
from dflash_runtime.errors import PairError


def test_a_biased_head_cannot_be_borrowed(tmp_path: Path) -> None:
    config = write_target(tmp_path / "t", "phi", num_key_value_heads=4, tie_word_embeddings=False)
    write_drafter(tmp_path / "d", config, taps=(0, 1))
    options = BuildOptions(str(tmp_path / "t"), str(tmp_path / "d"))
    with pytest.raises(PairError, match="output head has a bias"):
        plan_build(options)
    alone = plan_build(BuildOptions(str(tmp_path / "t")))
    (tmp_path / "b").mkdir()
    manifest = export_bundle(alone, tmp_path / "b", lambda *_: None)
    assert manifest.drafter is None and "lm_head.bias" in manifest.weights

"""What `plan` says int8 and int4 weights take, against bundles that hold them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from pairs import MAIN, quiet

from dflash_export.build import export_bundle
from dflash_export.build_plan import plan_build
from dflash_export.quantization import quantize_options
from dflash_tools.decoder_families import read_model_shape
from dflash_tools.plan_formulas import Storage, model_bytes

WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "tie_word_embeddings": False}


@pytest.mark.parametrize("layers", ["int4", "int8"])
def test_weights_take_what_the_plan_says(tmp_path: Path, layers: str) -> None:
    pair = dataclasses.replace(MAIN, precision="bf16", target=WIDE, drafter={})
    pair.write(tmp_path)
    options = dataclasses.replace(pair.options(tmp_path), drafter=None)
    options = dataclasses.replace(options, quantize=quantize_options(layers, "keep", "keep", 128))
    (tmp_path / "bundle").mkdir()
    manifest = export_bundle(plan_build(options), tmp_path / "bundle", quiet)
    held = sum(entry.length_bytes for entry in manifest.weights.values())
    shape = read_model_shape(json.loads((tmp_path / "target" / "config.json").read_text()), "target")
    assert held == pytest.approx(model_bytes(shape, Storage(layers, "bf16")), rel=0.03)

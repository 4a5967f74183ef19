"""Checkpoints that each format's own library wrote mean here what that library says they mean.

They lie in `tests/cross/quantized_checkpoints/`, with the script that made them and what the libraries say.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from dflash_export.checkpoint import quantization_config
from dflash_export.dequantized_weights import read_float_weight
from dflash_export.quantized_formats import read_quantized_places
from dflash_export.quantized_formats.imported_place import ImportedPlace, imported_parts
from dflash_export.tensor_files import read_tensor_places
from dflash_export.weight_store import store_weights
from dflash_runtime.bundle import Manifest
from dflash_runtime.errors import CheckpointError

CHECKPOINTS = Path(__file__).parents[1] / "cross" / "quantized_checkpoints"
NAMES = sorted(path.parent.name for path in CHECKPOINTS.glob("*/meant.json"))
ACT_ORDER = ("ct-act-order", "gptq-act-order")


def quiet(stage: str, done: int, total: int) -> None: ...


def bundle_of(name: str, folder: Path) -> Manifest:
    """The checkpoint's quantised weights in a file as a bundle in fp32 has them."""
    config = quantization_config(CHECKPOINTS / name)
    assert config is not None
    places = read_quantized_places(config, read_tensor_places(CHECKPOINTS / name), name)
    quantised = {key: place for key, place in places.items() if isinstance(place, ImportedPlace)}
    parts, facts = imported_parts(quantised, list(quantised), "F32")
    stored = store_weights(folder, "w.safetensors", parts, "F32", quiet)
    manifest = object.__new__(Manifest)
    object.__setattr__(manifest, "weights", stored.entries)
    object.__setattr__(manifest, "quantized", facts)
    return manifest


def test_every_format_is_there() -> None:
    assert len(NAMES) == 21 and sum(name.startswith("drafter-") for name in NAMES) == 4


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ACT_ORDER])
def test_weights_are_those_the_library_means(name: str, tmp_path: Path) -> None:
    manifest = bundle_of(name, tmp_path)
    meant = json.loads((CHECKPOINTS / name / "meant.json").read_text())["weights"]
    assert manifest.quantized.keys() == meant.keys()
    for weight, (dtype, expected) in meant.items():
        values = read_float_weight(tmp_path, manifest, weight).to(getattr(torch, dtype)) + 0.0
        found = hashlib.sha256(values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        assert found == expected, weight
    with safe_open(tmp_path / "w.safetensors", "pt") as file:  # the format's own reader
        assert set(file.keys()) == set(manifest.weights)


@pytest.mark.parametrize("name", ACT_ORDER)
def test_inputs_in_another_order_are_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"_proj is quantised with act-order.*no kernels here"):
        bundle_of(name, tmp_path)


def test_one_wrong_value_would_be_seen(tmp_path: Path) -> None:
    manifest = bundle_of("ct-int4", tmp_path)
    name = next(iter(manifest.quantized))
    entry = manifest.weights[name]
    data = bytearray((tmp_path / "w.safetensors").read_bytes())
    data[entry.offset_bytes] ^= 1
    (tmp_path / "w.safetensors").write_bytes(data)
    dtype, expected = json.loads((CHECKPOINTS / "ct-int4" / "meant.json").read_text())["weights"][name]
    values = read_float_weight(tmp_path, manifest, name).to(getattr(torch, dtype)) + 0.0
    assert hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest() != expected

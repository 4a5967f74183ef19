"""A build whose graphs or weights say something else than the checkpoint ends with the tensor's name and no bundle."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Once
from faults import edit_graph, last_slot_is_another_token, taps_are_swapped, window_is_one_wider
from pairs import FULL, SLIDING, Pair, export_quickly, quiet

from dflash_runtime import Bundle, ParityError
from dflash_runtime.bundle import Manifest, file_facts, read_record, write_record
from dflash_runtime.engine_record import ENGINE_RECORD_NAME, HostEngineRecord, engine_folder
from dflash_tools import pipeline

UNTIED = Pair(
    "untied-with-biases",
    "llama",
    target={"attention_bias": True, "num_key_value_heads": 2},
    drafter={"taps": (1, 0), "layer_types": [SLIDING, FULL], "sliding_window": 8, "attention_bias": True},
)
"""Embedding and head differ, q, k, v and o have biases, and the drafter borrows both tables."""


@pytest.fixture(scope="module")
def pair_folder(once: Once) -> Path:
    return once("untied-exported", lambda folder: export_quickly(UNTIED, folder))


def _write(bundle: Path, name: str, change: Callable[[Any], Any]) -> None:
    entry = Bundle.open(bundle, check_files=False).manifest.weights[name]
    with (bundle / entry.file).open("r+b") as stream:
        stream.seek(entry.offset_bytes)
        values = np.frombuffer(stream.read(entry.length_bytes), np.float32).reshape(entry.shape).copy()
        stream.seek(entry.offset_bytes)
        stream.write(np.ascontiguousarray(change(values), np.float32).tobytes())


def weight_is_off(name: str) -> Callable[[Path], None]:
    def fault(bundle: Path) -> None:
        def change(values: Any) -> Any:
            values.flat[values.size // 2] += 0.5
            return values

        _write(bundle, name, change)

    return fault


def head_is_the_embedding(bundle: Path) -> None:
    """An untied model exported as if it were tied."""
    _point_elsewhere(bundle, "lm_head.weight", "model.embed_tokens.weight")


def drafter_borrows_no_head(bundle: Path) -> None:
    """The drafter's graph reads the embedding where its head should be; the target is right."""
    _rename(bundle, "drafter.onnx", "lm_head.weight", "model.embed_tokens.weight")


def biases_are_dropped(bundle: Path) -> None:
    for name in Bundle.open(bundle, check_files=False).manifest.weights:
        if name.startswith("model.") and name.endswith("k_proj.bias"):
            _write(bundle, name, np.zeros_like)


def drafter_bias_is_dropped(bundle: Path) -> None:
    _write(bundle, "drafter.layers.1.self_attn.o_proj.bias", np.zeros_like)


def _point_elsewhere(bundle: Path, name: str, source: str) -> None:
    entries = Bundle.open(bundle, check_files=False).manifest.weights
    data = (bundle / entries[source].file).read_bytes()
    values = data[entries[source].offset_bytes :][: entries[source].length_bytes]
    _write(bundle, name, lambda _: np.frombuffer(values, np.float32))


def _rename(bundle: Path, file: str, name: str, other: str) -> None:
    def change(model: Any) -> None:
        wrong, right = (model.graph.initializers[n] for n in (name, other))
        for use in tuple(wrong.uses()):
            use.node.replace_input_with(use.idx, right)
        del model.graph.initializers[name]

    edit_graph(bundle, file, change)


FAULTS: list[tuple[str, Callable[[Path], None], str]] = [
    ("one head value", weight_is_off("lm_head.weight"), "portable logits"),
    ("one weight in the middle", weight_is_off("model.layers.0.mlp.down_proj.weight"), "portable (logits|taps)"),
    ("one norm value", weight_is_off("model.layers.1.input_layernorm.weight"), "portable keys"),
    ("one drafter weight", weight_is_off("drafter.fc.weight"), "portable drafter context"),
    ("one late drafter weight", weight_is_off("drafter.layers.1.mlp.up_proj.weight"), "portable draft_logits"),
    ("shared head", head_is_the_embedding, "portable logits"),
    ("drafter without its head", drafter_borrows_no_head, "portable draft_logits"),
    ("no target biases", biases_are_dropped, "portable keys"),
    ("no drafter bias", drafter_bias_is_dropped, "portable draft_logits"),
    ("swapped taps", taps_are_swapped, "portable taps"),
    ("another last slot", last_slot_is_another_token, "portable draft_logits"),
    ("a wider window", window_is_one_wider, "portable draft_logits"),
]


@pytest.mark.parametrize(("fault", "words"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_a_faulty_export_ends_the_build(
    pair_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Path], None], words: str
) -> None:
    def export_with_fault(plan: Any, root: Path, *_: Any) -> Manifest:
        shutil.copytree(pair_folder / "bundle", root, dirs_exist_ok=True, ignore=shutil.ignore_patterns("engines"))
        fault(root)
        return Bundle.open(root, check_files=False).manifest

    monkeypatch.setattr(pipeline, "export_bundle", export_with_fault)
    with pytest.raises(ParityError, match=f"parity checks failed.*{words}"):
        pipeline.build(UNTIED.options(pair_folder), tmp_path / "b", "ort-cpu", quiet)
    assert list(tmp_path.iterdir()) == []


def test_a_faulty_engine_ends_the_build(pair_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The portable graphs are right, and what the runtime executes is not."""
    lower = pipeline.lower_bundle

    def lower_with_fault(bundle: Bundle) -> None:
        lower(bundle)
        _rename(bundle.path, "engines/ort-cpu/drafter.onnx", "lm_head.weight", "model.embed_tokens.weight")
        folder = engine_folder(bundle, "ort-cpu")
        record = read_record(HostEngineRecord, folder / "engine.json", HostEngineRecord.SCHEMA_VERSION)
        write_record(folder / ENGINE_RECORD_NAME, dataclasses.replace(record, files=file_facts(folder, record.files)))

    def export(plan: Any, root: Path, *_: Any) -> Manifest:
        shutil.copytree(pair_folder / "bundle", root, dirs_exist_ok=True, ignore=shutil.ignore_patterns("engines"))
        return Bundle.open(root, check_files=False).manifest

    monkeypatch.setattr(pipeline, "export_bundle", export)
    monkeypatch.setattr(pipeline, "lower_bundle", lower_with_fault)
    with pytest.raises(ParityError, match=r"(lowered|rings) drafter draft_(ids|logits)"):
        pipeline.build(UNTIED.options(pair_folder), tmp_path / "b", "ort-cpu", quiet)
    assert list(tmp_path.iterdir()) == []


def test_one_copy_of_each_table_and_own_cache_shapes(pair_folder: Path) -> None:
    data = json.loads((pair_folder / "bundle" / "bundle.json").read_text(encoding="utf-8"))
    tables = [name for name, entry in data["weights"].items() if entry["shape"] == [512, 64]]
    assert sorted(tables) == ["lm_head.weight", "model.embed_tokens.weight"]
    assert {tuple(t["shape"]) for t in data["target"]["graph"]["state"]} == {(1, 2, "T", 16)}
    assert {tuple(t["shape"]) for t in data["drafter"]["graph"]["state"]} == {(1, 2, "T", 32)}

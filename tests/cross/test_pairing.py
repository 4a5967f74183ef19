"""What cannot work is refused before any work, with both values; what is spelled differently is built the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Once
from pairs import FULL, SLIDING, Pair, quiet
from safetensors.torch import load_file, save_file
from tiny_models import drafter_config, write_drafter, write_target

from dflash_export.build_plan import BuildOptions, plan_build
from dflash_export.drafter_build import trace_and_store_drafter
from dflash_export.weight_store import StoredWeights, store_weights
from dflash_runtime import CheckpointError, DFlashError, PairError
from dflash_runtime.bundle import (
    SCHEMA_VERSION,
    GraphFacts,
    Manifest,
    Provenance,
    SourceFacts,
    TapFacts,
    TargetFacts,
    TensorFacts,
    TextFacts,
)
from dflash_tools import pipeline

PLAIN = Pair("plain", drafter={"taps": (0, 2)})


@pytest.fixture(scope="module")
def checkpoints(once: Once) -> Path:
    return once("plain-checkpoints", PLAIN.write)


@pytest.fixture
def copy(checkpoints: Path, tmp_path: Path) -> Path:
    return shutil.copytree(checkpoints, tmp_path / "in")


@pytest.fixture
def refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Builds, expects a refusal before any work, and returns its words."""

    def work(*args: Any) -> None:
        raise AssertionError("work began")

    def run(folder: Path, error: type[DFlashError], **options: Any) -> str:
        monkeypatch.setattr(pipeline, "export_bundle", work)
        place = tmp_path / "out"
        place.mkdir()
        with pytest.raises(error) as caught:
            pipeline.build(
                BuildOptions(str(folder / "target"), str(folder / "drafter"), **options), place / "b", "ort-cpu", quiet
            )
        assert list(place.iterdir()) == []
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return run


def edit(folder: Path, nested: dict[str, Any] | None = None, **top: Any) -> None:
    """Changes a drafter's config; None removes a key."""
    path = folder / "drafter" / "config.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    for place, changes in ((data, top), (data["dflash_config"], nested or {})):
        for key, value in changes.items():
            place.pop(key, None)
            if value is not None:
                place[key] = value
    path.write_text(json.dumps(data), encoding="utf-8")


def shard(folder: Path, stem: str, count: int = 4) -> list[Path]:
    """Splits a checkpoint's weights over files of any name, with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = [folder / f"{stem}-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    parts: list[dict[str, torch.Tensor]] = [{} for _ in files]
    for i, name in enumerate(sorted(tensors)):
        parts[i % count][name] = tensors[name]
    for file, part in zip(files, parts, strict=True):
        save_file(part, file, metadata={"format": "pt"})
    weight_map = {name: file.name for file, part in zip(files, parts, strict=True) for name in part}
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / f"{stem}.safetensors.index.json").write_text(index, encoding="utf-8")
    return files


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_missing_shards_are_all_listed(copy: Path, refuse: Callable[..., str], role: str) -> None:
    files = shard(copy / role, "dflash_draft_model" if role == "drafter" else "model")
    plan_build(BuildOptions(str(copy / "target"), str(copy / "drafter")))  # whole, it is found by its index
    files[1].unlink()
    files[3].unlink()
    words = refuse(copy, CheckpointError)
    assert files[1].name in words
    assert files[3].name in words
    assert "2 of its 4" in words


@pytest.mark.parametrize("role", ["target", "drafter"])
@pytest.mark.parametrize("damage", ["truncated", "stale", "empty", "gone"])
def test_damaged_weights_are_refused(copy: Path, refuse: Callable[..., str], role: str, damage: str) -> None:
    folder = copy / role
    if damage == "gone":
        (folder / "model.safetensors").unlink()
        expected = "no *.safetensors"
    elif damage == "empty":
        save_file({}, folder / "model.safetensors")
        expected = "without a single tensor"
    else:
        files = shard(folder, "model")
        if damage == "truncated":
            size = files[2].stat().st_size
            with files[2].open("r+b") as stream:
                stream.truncate(size - 100)
            expected = f"has {size - 100} bytes and needs {size}"
        else:
            index = folder / "model.safetensors.index.json"
            data = json.loads(index.read_text(encoding="utf-8"))
            data["weight_map"]["lost.weight"] = files[0].name
            index.write_text(json.dumps(data), encoding="utf-8")
            expected = "lost.weight"
    assert expected in refuse(copy, CheckpointError)


@pytest.mark.parametrize(
    ("ids", "words"),
    [(None, "target_layer_ids"), ([], "[]"), ([1, 1], "[1, 1]"), ([-1, 2], "[-1, 2]"), (2, "target_layer_ids is 2")],
)
def test_taps_are_never_guessed(copy: Path, refuse: Callable[..., str], ids: Any, words: str) -> None:
    edit(copy, {"target_layer_ids": ids})
    assert words in refuse(copy, CheckpointError)


@pytest.mark.parametrize(
    ("nested", "top", "both"),
    [
        ({"target_layer_ids": [0, 5]}, {}, ["[0, 5]", "has 4"]),
        ({"target_layer_ids": [0]}, {}, ["128", "64"]),
        ({"mask_token_id": 600}, {}, ["600", "512"]),
        ({}, {"vocab_size": 500}, ["500", "512"]),
        ({}, {"num_target_layers": 36}, ["36", "4"]),
        ({}, {"target_hidden_size": 96}, ["96", "64"]),
        ({"block_size": 1}, {}, ["block_size is 1"]),
        ({}, {"layer_types": [SLIDING, FULL], "sliding_window": 3, "use_sliding_window": True}, ["3 tokens", "4"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_both_values_are_named(
    copy: Path, refuse: Callable[..., str], nested: dict[str, Any], top: dict[str, Any], both: list[str]
) -> None:
    edit(copy, nested, **top)
    words = refuse(copy, PairError)
    assert all(value in words for value in both), words


def test_another_hidden_size(copy: Path, refuse: Callable[..., str]) -> None:
    shutil.rmtree(copy / "drafter")
    write_drafter(copy / "drafter", hidden_size=96)
    words = refuse(copy, PairError)
    assert "96" in words
    assert "64" in words


def test_another_tokenizer(copy: Path, refuse: Callable[..., str]) -> None:
    data = json.loads((copy / "target" / "tokenizer.json").read_text(encoding="utf-8"))
    data["added_tokens"].append({**data["added_tokens"][0], "id": 259, "content": "<new>"})
    (copy / "drafter" / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    words = refuse(copy, PairError)
    assert "260" in words
    assert "259" in words


def test_a_drafter_made_for_less_context(copy: Path, refuse: Callable[..., str]) -> None:
    edit(copy, max_position_embeddings=12)
    plan = plan_build(BuildOptions(str(copy / "target"), str(copy / "drafter")))
    assert plan.target.max_context_tokens == 12
    assert any("12 tokens by the drafter" in note for note in plan.notes)
    words = refuse(copy, PairError, max_context_tokens=16)
    assert "16" in words
    assert "12" in words


@pytest.mark.parametrize(
    ("tensors", "top", "words"),
    [
        ({"lm_head.weight": torch.zeros(256, 64)}, {}, "needs draft_vocab_size"),
        ({"lm_head.weight": torch.zeros(256, 64), "d2t": torch.zeros(256, dtype=torch.int64)}, {}, "draft_vocab_size"),
        ({"lm_head.weight": torch.zeros(256, 64)}, {"draft_vocab_size": 256}, "no tensor d2t"),
        ({"d2t": torch.zeros(256, dtype=torch.int64)}, {"draft_vocab_size": 256}, "lm_head.weight"),
    ],
)
def test_a_smaller_head_is_never_replaced_by_the_targets(
    copy: Path, refuse: Callable[..., str], tensors: dict[str, torch.Tensor], top: dict[str, Any], words: str
) -> None:
    edit(copy, **top)
    file = copy / "drafter" / "model.safetensors"
    save_file({**load_file(file), **tensors}, file)
    assert words in refuse(copy, CheckpointError)


def test_biases_the_config_does_not_state_are_not_dropped(copy: Path, refuse: Callable[..., str]) -> None:
    shutil.rmtree(copy / "drafter")
    write_drafter(copy / "drafter", taps=(0, 2), attention_bias=True)
    edit(copy, attention_bias=None)
    assert "layers.1.self_attn.o_proj.bias" in refuse(copy, CheckpointError)


SPELLINGS = ("flat", "nested", "nested-block", "nested-rope")


def _drafter_part(folder: Path, root: Path) -> tuple[Manifest, dict[str, bytes]]:
    """Only what a build makes of the drafter: its graphs and its part of the manifest."""
    plan = plan_build(BuildOptions(str(folder / "target"), str(folder / "drafter")))
    assert plan.drafter is not None
    places = {n: p for n, p in plan.target.checkpoint.places.items() if "embed" in n}
    stored: StoredWeights = store_weights(root, "weights/target.safetensors", places, "F32", quiet)
    taps = TensorFacts("taps", "F32", ["B", "S", 128])
    source, graph = SourceFacts("folder", "t", None, ""), GraphFacts("target.onnx", [], [taps], [])
    name = next(iter(places))
    target = TargetFacts("t", source, "T", "t", 4, 64, 512, 1, 512, True, name, name, graph)
    manifest = Manifest(
        SCHEMA_VERSION, "fp32", 512, plan.block_sizes, target, None, TapFacts([0, 2], "drafter"),
        TextFacts([], None, False, {}, {}), stored.entries, {}, [], Provenance("", [], {}),
    )  # fmt: skip
    manifest, _ = trace_and_store_drafter(plan.drafter, root, manifest, quiet)
    return manifest, {path.name: path.read_bytes() for path in root.glob("*.onnx")}


@pytest.mark.slow
def test_four_spellings_are_one_drafter(copy: Path, tmp_path: Path) -> None:
    configs, parts = [], []
    for spelling in SPELLINGS:
        config = drafter_config(taps=(0, 2), spelling=spelling, rope_theta=1e6)
        (copy / "drafter" / "config.json").write_text(json.dumps(config), encoding="utf-8")
        plan = plan_build(BuildOptions(str(copy / "target"), str(copy / "drafter")))
        assert plan.drafter is not None
        configs.append((plan.drafter.config, plan.block_sizes))
        if spelling in SPELLINGS[:2]:
            root = tmp_path / spelling
            root.mkdir()
            parts.append(_drafter_part(copy, root))
    assert all(config == configs[0] for config in configs)
    (one, graphs), (two, others) = parts
    assert graphs.keys() == {"drafter.onnx", "drafter_context.onnx"}
    assert graphs == others
    assert one.drafter is not None
    assert two.drafter is not None
    for fact in ("block_size", "mask_token_id", "graph", "context_graph", "num_parameters"):
        assert getattr(one.drafter, fact) == getattr(two.drafter, fact)
    assert one.block_sizes == two.block_sizes


def test_no_block_size_anywhere_is_the_authors_default_and_said(copy: Path) -> None:
    edit(copy, {"block_size": None})
    plan = plan_build(BuildOptions(str(copy / "target"), str(copy / "drafter")))
    assert plan.block_sizes == [4, 8, 16]
    assert any("no block_size" in note and "16" in note for note in plan.notes)


def test_a_target_without_kv_heads_in_its_config(tmp_path: Path) -> None:
    """Transformers' rule holds: as many KV heads as heads."""
    from dflash_export.target_trace import trace_target

    write_target(tmp_path / "t", "llama", num_hidden_layers=1, num_key_value_heads=4)
    path = tmp_path / "t" / "config.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    del data["num_key_value_heads"]
    path.write_text(json.dumps({**data, "head_dim": None}), encoding="utf-8")
    plan = plan_build(BuildOptions(str(tmp_path / "t")))
    traced = trace_target(plan.target.config, torch.float32)
    past = next(value for value in traced.model.graph.inputs if value.name == "past_key_values.0.key")
    assert past.shape is not None
    assert (past.shape[1], past.shape[3]) == (4, 16)

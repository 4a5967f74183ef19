"""Pairs that do not fit, and drafter checkpoints that do not hold what their config says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file

from dflash_export.drafter_config import read_drafter_config
from dflash_export.drafter_weights import match_drafter_weights
from dflash_export.pair_check import config_findings
from dflash_export.pair_findings import TargetSide, require_fit
from dflash_export.tensor_files import read_tensor_places
from dflash_runtime.errors import CheckpointError, PairError, UnsupportedModelError

TARGET = TargetSide("tiny", Path("nowhere"), num_layers=4, hidden_size=64, vocab_size=512, model_type="qwen3")


def pair_refusal(folder: Path, limits: dict[str, Any] | None = None, **stated: Any) -> str:
    tiny_models.write_drafter(folder, **stated)
    findings = config_findings(TARGET, read_drafter_config(folder), read_tensor_places(folder), **(limits or {}))
    with pytest.raises(PairError) as caught:
        require_fit(findings)
    return str(caught.value)


def test_a_fitting_pair_passes(tmp_path: Path) -> None:
    tiny_models.write_drafter(tmp_path)
    config, places = read_drafter_config(tmp_path), read_tensor_places(tmp_path)
    assert config_findings(TARGET, config, places, max_context_tokens=512, block_sizes=(2, 3)) == []
    weights = match_drafter_weights(config, places, 512, "dr")
    assert weights.table_names("e", "h") == ("e", "h")
    assert set(weights.bundle_places) == {f"drafter.{name}" for name in places}


def test_a_tap_beyond_the_target_names_both_countings(tmp_path: Path) -> None:
    text = pair_refusal(tmp_path, taps=(0, 5))
    assert text.startswith("the drafter taps layers [0, 5] and the target has 4 (0 to 3); [5] do not exist.")
    assert "count layers from 0" in text and "from 1, as [1, 6]" in text


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"hidden_size": 96}, "hidden_size is 96 and the target's is 64"),
        ({"target_hidden_size": 96}, "target_hidden_size is 96 and the target's hidden_size is 64"),
        ({"vocab_size": 500}, "vocab_size is 500 and the target's is 512"),
        ({"mask_token_id": 600}, "mask_token_id is 600 and the target's embedding has 512 rows (ids 0 to 511)"),
        ({"num_target_layers": 36}, "target of 36 layers (num_target_layers) and this one has 4"),
        ({"block_size": 1}, "block_size is 1"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 3}, "window is 3 tokens and a block has 4"),
    ],
)
def test_both_values_are_named(stated: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in pair_refusal(tmp_path, **stated)


def test_limits_of_the_bundle_are_compared(tmp_path: Path) -> None:
    text = pair_refusal(tmp_path / "a", {"max_context_tokens": 16}, max_position_embeddings=12)
    assert "context is 16 tokens and the drafter was made for 12" in text
    sliding = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}
    assert "window is 8 tokens and a block has 16" in pair_refusal(tmp_path / "b", {"block_sizes": (16,)}, **sliding)


def test_fc_of_other_taps(tmp_path: Path) -> None:
    tiny_models.write_drafter(tmp_path, taps=(0, 2))
    config = json.loads((tmp_path / "config.json").read_text())
    config["dflash_config"]["target_layer_ids"] = [0, 1, 2]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PairError, match="takes 128 values and 3 taps of 64 give 192"):
        require_fit(config_findings(TARGET, read_drafter_config(tmp_path), read_tensor_places(tmp_path)))


def test_every_error_is_named_at_once(tmp_path: Path) -> None:
    text = pair_refusal(tmp_path, mask_token_id=600, taps=(0, 5))
    assert "mask_token_id is 600" in text and " Also: the drafter taps layers [0, 5]" in text


def checkpoint_refusal(folder: Path, kind: type[Exception] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        match_drafter_weights(read_drafter_config(folder), read_tensor_places(folder), 512, "dr")
    return str(caught.value)


def test_every_tensor_is_accounted_for(tmp_path: Path) -> None:
    tiny_models.write_drafter(tmp_path, attention_bias=True)
    tensors = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "attention_bias": False}))
    text = checkpoint_refusal(tmp_path)
    assert text.startswith("dr holds 8 tensors its config does not ask for: layers.0.self_attn.k_proj.bias, ")
    assert text.count(".bias") == 8
    (tmp_path / "config.json").write_text(json.dumps(config))
    fewer = {k: v for k, v in tensors.items() if not k.startswith("layers.1.mlp") and k != "norm.weight"}
    save_file(fewer, tmp_path / "model.safetensors")
    text = checkpoint_refusal(tmp_path)
    assert "lacks 4 of 33 tensors" in text
    assert all(f"{name}" in text for name in ("layers.1.mlp.up_proj.weight", "norm.weight"))
    wrong = {**tensors, "hidden_norm.weight": torch.ones(63), "fc.weight": torch.ones(64, 64)}
    save_file(wrong, tmp_path / "model.safetensors")
    text = checkpoint_refusal(tmp_path)
    assert "fc.weight is [64, 64] and should be [64, 128]" in text
    assert "hidden_norm.weight is [63] and should be [64]" in text


def test_a_model_prefix_and_old_rotary_tables_are_tolerated(tmp_path: Path) -> None:
    tiny_models.write_drafter(tmp_path)
    tensors = {f"model.{k}": v for k, v in load_file(tmp_path / "model.safetensors").items()}
    save_file({**tensors, "rotary_emb.inv_freq": torch.ones(16)}, tmp_path / "model.safetensors")
    weights = match_drafter_weights(read_drafter_config(tmp_path), read_tensor_places(tmp_path), 512, "dr")
    assert weights.places["fc.weight"].shape == (64, 128)


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        ("markov_head.weight", "Domino, DSpark or JetSpec"),
        ("layers.0.self_attn.qkv_proj.weight", "Laguna"),
        ("layers.1.self_attn.attention_sink_bias", "attention sinks"),
    ],
)
def test_weights_of_other_kinds(tensor: str, kind: str, tmp_path: Path) -> None:
    tiny_models.write_drafter(tmp_path, tensors={tensor: torch.zeros(128, 64)})
    text = checkpoint_refusal(tmp_path, UnsupportedModelError)
    assert text.startswith(f"dr holds {tensor}") and kind in text


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        ("layers.0.attention_conv.base_kernel", "belong to DFlash 2, and the config describes plain DFlash"),
        ("candidate_selector.successor_codebook", "belong to DFlash 2, and the config describes plain DFlash"),
        ("d2t", "states no draft_vocab_size"),
        ("encoder.fc.weight", "another kind of drafter"),
        ("lm_head.weight", "needs draft_vocab_size in the config and the tensor d2t"),
    ],
)
def test_tensors_the_config_does_not_speak_of(tensor: str, words: str, tmp_path: Path) -> None:
    tiny_models.write_drafter(tmp_path, tensors={tensor: torch.zeros(128, 64)})
    text = checkpoint_refusal(tmp_path)
    assert tensor in text and words in text


def test_a_learned_mask_embedding_is_refused(tmp_path: Path) -> None:
    tiny_models.write_drafter(tmp_path)
    (tmp_path / "mask_embedding.pt").touch()
    with pytest.raises(UnsupportedModelError, match="learned mask embedding"):
        read_drafter_config(tmp_path)


def test_shards_of_any_name_are_found_by_the_index(tmp_path: Path) -> None:
    tiny_models.write_drafter(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {name: f"dflash_draft_model-{i % 3 + 1:05d}-of-00003.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: tensors[n] for n in names if files[n] == file}, tmp_path / file)
    index = tmp_path / "dflash_draft_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    config = read_drafter_config(tmp_path)
    assert len(match_drafter_weights(config, read_tensor_places(tmp_path), 512, "dr").places) == len(names)
    last = tmp_path / "dflash_draft_model-00003-of-00003.safetensors"
    last.write_bytes(last.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="is truncated"):
        read_tensor_places(tmp_path)
    last.unlink()
    (tmp_path / "dflash_draft_model-00001-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 2 of its 3 weight files: .*00001.*00003"):
        read_tensor_places(tmp_path)

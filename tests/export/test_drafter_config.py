"""A drafter's config in its spellings, and what is refused with which words."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import tiny_models
import torch

from dflash_export.drafter_attention import LayerAttention
from dflash_export.drafter_config import DrafterConfig, parse_drafter_config
from dflash_export.drafter_rope import rope_frequencies
from dflash_runtime.errors import CheckpointError, UnsupportedModelError

WHERE = "dr/config.json"
SLIDING, FULL = "sliding_attention", "full_attention"


def parse(nested: dict[str, Any] | None = None, **arguments: Any) -> DrafterConfig:
    config = tiny_models.drafter_config(**arguments)
    for key, value in (nested or {}).items():
        config["dflash_config"][key] = value
        if value is None:
            del config["dflash_config"][key]
    return parse_drafter_config(config, WHERE)


def refusal(kind: type[Exception], *args: Any, **arguments: Any) -> str:
    with pytest.raises(kind) as caught:
        parse(*args, **arguments)
    return str(caught.value)


def test_four_spellings_say_the_same() -> None:
    configs = [parse(spelling=s, rope_theta=1e6) for s in ("flat", "nested", "nested-block", "nested-rope")]
    assert configs[0].block_size == 4 and configs[0].rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert all(config == configs[0] for config in configs)


def test_taps_and_mask_may_stand_at_top_level() -> None:
    config = tiny_models.drafter_config()
    moved = {**config, **config["dflash_config"]}
    del moved["dflash_config"]
    assert parse_drafter_config(moved, WHERE) == parse()


def test_an_absent_block_size_is_16_and_said() -> None:
    config = parse({"block_size": None})
    assert config.block_size == 16
    assert "no block_size" in config.notes[0] and "16 is used" in config.notes[0]
    assert parse().notes == ()


def test_hidden_state_numbers_become_layers() -> None:
    config = parse({"target_layer_ids": None}, aux_hidden_state_layer_ids=[1, 3])
    assert config.target_layer_ids == (0, 2)
    assert "counts from the embedding" in config.notes[0]


def test_head_dim_and_kv_heads_are_the_configs_own() -> None:
    assert (parse().head_dim, parse().num_kv_heads) == (32, 2)
    absent = parse(head_dim=None, num_key_value_heads=None)
    assert (absent.head_dim, absent.num_kv_heads) == (16, 4)


@pytest.mark.parametrize(
    ("nested", "top", "words"),
    [
        ({"block_size": 4}, {"block_size": 8}, "block_size 8 and dflash_config.block_size 4"),
        ({"mask_token_id": 5}, {"mask_token_id": 6}, "mask_token_id 6 and dflash_config.mask_token_id 5"),
        ({}, {"rope_theta": 5.0, "spelling": "nested-rope"}, None),
    ],
)
def test_places_that_disagree_are_refused(nested: dict[str, Any], top: dict[str, Any], words: str | None) -> None:
    if words is None:
        config = {**tiny_models.drafter_config(), "rope_theta": 5.0}
        with pytest.raises(CheckpointError, match=r"rope_theta 5\.0 and rope_parameters\.rope_theta 10000\.0"):
            parse_drafter_config(config, WHERE)
        return
    config = {**tiny_models.drafter_config(), **top}
    config["dflash_config"].update(nested)
    with pytest.raises(CheckpointError, match=f"^{WHERE} contradicts itself: {re.escape(words)}"):
        parse_drafter_config(config, WHERE)


def test_missing_taps_are_never_guessed() -> None:
    text = refusal(CheckpointError, {"target_layer_ids": None})
    assert text.startswith(f"{WHERE} does not state which target layers are tapped")
    assert "dflash_config.target_layer_ids, target_layer_ids" in text


@pytest.mark.parametrize("ids", [[], [0, 0], [-1, 2], [0, 1.5], "0,2", [True, 2]])
def test_tap_lists_that_make_no_sense(ids: Any) -> None:
    text = refusal(CheckpointError, {"target_layer_ids": ids})
    assert text == f"{WHERE}: target_layer_ids is {ids!r}; it must list different layers, numbered from 0."


def test_missing_mask_token_and_rope_base_name_their_keys() -> None:
    assert refusal(CheckpointError, {"mask_token_id": None}) == (
        f"{WHERE} does not state mask_token_id. Accepted keys: dflash_config.mask_token_id, mask_token_id."
    )
    text = refusal(CheckpointError, spelling="flat", rope_theta=None)
    assert "Accepted keys: rope_theta, rope_parameters.rope_theta, rope_scaling.rope_theta." in text


@pytest.mark.parametrize(
    ("stated", "causal", "windows"),
    [
        ({}, [False, False], [None, None]),
        ({"layer_types": [SLIDING, FULL], "sliding_window": 8}, [True, False], [8, None]),
        ({"layer_types": [SLIDING, FULL], "sliding_window": 8, "is_causal": False}, [False, False], [8, None]),
        ({"layer_types": [FULL, FULL], "is_causal": True}, [True, True], [None, None]),
        ({"nested": {"causal": True}}, [True, True], [None, None]),
        ({"nested": {"use_swa": True, "swa_window_size": 6, "causal": False}}, [False, False], [6, 6]),
        ({"sliding_window": 8}, [False, False], [None, None]),
        (
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
            [False, True],
            [None, 8],
        ),
        (
            {"layer_types": [SLIDING, SLIDING], "sliding_window": 8, "nested": {"swa_window_size": 5}},
            [True, True],
            [5, 5],
        ),
    ],
)
def test_causality_and_windows(stated: dict[str, Any], causal: list[bool], windows: list[int | None]) -> None:
    layers = parse(**stated).layers
    assert layers == tuple(LayerAttention(c, w) for c, w in zip(causal, windows, strict=True))


def test_contradictory_attention_is_refused() -> None:
    text = refusal(CheckpointError, {"causal": False}, is_causal=True)
    assert text.startswith(f"{WHERE} contradicts itself: is_causal True and dflash_config.causal False")
    assert "no window" in refusal(CheckpointError, layer_types=[SLIDING, FULL])
    assert "use_sliding_window is false" in refusal(
        CheckpointError, layer_types=[SLIDING, FULL], sliding_window=8, use_sliding_window=False
    )
    assert "layer_types has 1 entries and num_hidden_layers is 2" in refusal(CheckpointError, layer_types=[FULL])
    assert "linear_attention" in refusal(UnsupportedModelError, layer_types=[FULL, "linear_attention"])


def test_what_a_layer_sees() -> None:
    q, k = torch.tensor([4, 5])[:, None], torch.arange(8)[None]
    assert LayerAttention(False, None).sees(q, k).all()
    assert LayerAttention(True, None).sees(q, k).sum(1).tolist() == [5, 6]
    assert LayerAttention(True, 3).sees(q, k)[0].nonzero().flatten().tolist() == [2, 3, 4]
    assert LayerAttention(False, 3).sees(q, k)[0].nonzero().flatten().tolist() == [2, 3, 4, 5, 6]


def test_both_spellings_of_a_rope_type() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    for key in ("type", "rope_type"):
        config = tiny_models.drafter_config(spelling="flat", rope_scaling={key: "llama3", **scaling})
        parameters = parse_drafter_config(config, WHERE).rope_parameters
        frequencies, factor = rope_frequencies(parameters, 16, 512, WHERE)
        expected = [1, 0.244385, 0.013042, 0.003953, 0.00125, 0.000395, 0.000125, 0.00004]
        torch.testing.assert_close(frequencies, torch.tensor(expected), rtol=0.02, atol=1e-6)
        assert factor == 1.0


def test_yarn_has_an_attention_factor() -> None:
    config = parse(rope_scaling={"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096})
    assert rope_frequencies(config.rope_parameters, 32, 262144, WHERE)[1] == pytest.approx(1.4159, abs=1e-4)


def test_rope_settings_that_cannot_be_used() -> None:
    assert "rope type 'dynamic'" in refusal(UnsupportedModelError, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    assert "incomplete or wrong" in refusal(CheckpointError, rope_scaling={"rope_type": "yarn"})
    by_layer = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    assert "differs by layer type" in refusal(UnsupportedModelError, rope_parameters=by_layer)


@pytest.mark.parametrize(
    ("nested", "top", "name"),
    [
        ({"projector_type": "domino"}, {}, "a domino drafter (dflash_config.projector_type)"),
        ({"projector_type": "dspark"}, {}, "a dspark drafter (dflash_config.projector_type)"),
        ({}, {"causal_head": True}, "a JetSpec drafter (causal_head)"),
        ({}, {"model_type": "laguna"}, "a Laguna drafter"),
        ({"attention_sink_bias": True}, {}, "a drafter with attention sinks (attention_sink_bias)"),
        ({}, {"attention_value_scale": 0.612}, "a drafter with attention_value_scale"),
        ({}, {"partial_rotary_factor": 0.5}, "a drafter with partial rotary embedding (partial_rotary_factor 0.5)"),
        ({}, {"is_neox_style": False}, "a drafter with interleaved rotary embedding (is_neox_style false)"),
        ({"sample_from_anchor": True}, {}, "a drafter whose anchor slot predicts too (sample_from_anchor)"),
        ({"shift_label": True}, {}, "a drafter whose anchor slot predicts too (shift_label)"),
    ],
)
def test_other_kinds_are_refused_by_name(nested: dict[str, Any], top: dict[str, Any], name: str) -> None:
    text = refusal(UnsupportedModelError, nested, **top)
    assert text.startswith(f"{WHERE} describes {name}")
    assert text.endswith("DFlash and DFlash 2 drafters can be exported.")


def test_the_architecture_decides_and_its_keys_do_where_it_was_rewritten() -> None:
    assert parse(architectures=["Qwen3DFlashDraftModel"]).architecture == "DFlashDraftModel"
    for architectures in (["DFlash2DraftModel"], ["DFlashDraftModel"], None):
        config = parse(**{**tiny_models.DFLASH2, "architectures": architectures})
        assert config.architecture == "DFlash2DraftModel"
        assert config.dflash2 is not None and config.dflash2.selector_top_k == 6
    assert "does not state selector_rank" in refusal(CheckpointError, **{**tiny_models.DFLASH2, "selector_rank": None})
    assert "no multiple of conv_group_size" in refusal(
        CheckpointError, **{**tiny_models.DFLASH2, "conv_group_size": 24}
    )
    assert "reduced vocabulary" in refusal(UnsupportedModelError, **tiny_models.DFLASH2, draft_vocab_size=100)


def test_what_is_no_drafter() -> None:
    assert "names the architecture Qwen3ForCausalLM" in refusal(
        UnsupportedModelError, architectures=["Qwen3ForCausalLM"]
    )
    assert "hidden_act is 'gelu'" in refusal(UnsupportedModelError, hidden_act="gelu")
    with pytest.raises(CheckpointError, match="no DFlash drafter"):
        parse_drafter_config({"hidden_size": 64}, WHERE)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "intermediate_size", "rms_norm_eps"])
def test_sizes_are_never_defaulted(key: str) -> None:
    assert f"does not state {key}" in refusal(CheckpointError, **{key: None})


def test_a_config_is_plain_data() -> None:
    assert dataclasses.replace(parse(), block_size=8).block_size == 8

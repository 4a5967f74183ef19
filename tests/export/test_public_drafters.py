"""Published drafters by what is publicly known of their configs: read as they are meant, and no fault is invented.

Values are those of public configs and cards; no weights are needed, and none were at hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_export.catalog import CATALOG
from dflash_export.drafter_attention import LayerAttention
from dflash_export.drafter_config import DrafterConfig, parse_drafter_config
from dflash_export.pair_check import config_findings
from dflash_export.pair_findings import NOTE, TargetSide
from dflash_export.pair_text_check import text_findings
from dflash_runtime.errors import UnsupportedModelError

SLIDING, FULL = "sliding_attention", "full_attention"
NOWHERE = Path("nowhere")


def drafter(taps: list[int], mask: int, *, nested: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """The keys that SpecForge and z-lab write, with the sizes of Qwen3-8B's drafter."""
    layers = changes.get("num_hidden_layers", 5)
    config = {
        "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3", "attention_bias": False, "attention_dropout": 0.0, "block_size": 16,
        "bos_token_id": 151643, "dtype": "bfloat16", "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12288, "layer_types": [FULL] * layers,
        "max_position_embeddings": 40960, "max_window_layers": layers, "num_attention_heads": 32,
        "num_hidden_layers": layers, "num_key_value_heads": 8, "num_target_layers": 36, "rms_norm_eps": 1e-6,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False,
        "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": taps, **(nested or {})}, **changes,
    }  # fmt: skip
    return {key: value for key, value in config.items() if key not in changes or value is not None}


def read(config: dict[str, Any]) -> DrafterConfig:
    return parse_drafter_config(config, "dr/config.json")


QWEN3_TAPS = [1, 9, 17, 25, 33]
WINDOWED = {"layer_types": [*[SLIDING] * 4, FULL], "sliding_window": 2048, "use_sliding_window": True}
GEMMA_31B = drafter(
    [1, 12, 23, 35, 46, 57], 4, nested={"final_logit_softcapping": 30.0}, hidden_size=5376, intermediate_size=10752,
    num_attention_heads=64, num_target_layers=60, vocab_size=262144, max_position_embeddings=131072, **WINDOWED,
)  # fmt: skip
PAIRS: dict[str, tuple[dict[str, Any], TargetSide]] = {
    "qwen3-4b": (
        drafter(QWEN3_TAPS, 151669, hidden_size=2560, intermediate_size=9728),
        TargetSide("Qwen/Qwen3-4B", NOWHERE, 36, 2560, 151936, "qwen3", (1e6,)),
    ),
    "qwen3-8b": (
        drafter(QWEN3_TAPS, 151669),
        TargetSide("Qwen/Qwen3-8B", NOWHERE, 36, 4096, 151936, "qwen3", (1e6,)),
    ),
    "gemma-4-31b": (
        GEMMA_31B, TargetSide("google/gemma-4-31B-it", NOWHERE, 60, 5376, 262144, "gemma4_text", (1e4, 1e6))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_no_fault_is_invented(name: str) -> None:
    config, target = PAIRS[name]
    facts, entry = read(config), CATALOG[name]
    assert entry.drafter is not None and entry.target == target.name
    findings = config_findings(target, facts, {})
    findings += text_findings(target, facts, NOWHERE, entry.drafter, entry.template_args)
    assert {one.severity for one in findings} <= {NOTE}
    assert {one.subject for one in findings} <= {"embedding", "tokenizer"}
    assert facts.notes == () and facts.unknown_keys == ()
    assert facts.target_layer_ids == entry.known.target_layer_ids and facts.mask_token_id == entry.known.mask_token_id


def test_windows_and_causality_of_a_mixed_drafter() -> None:
    assert read(GEMMA_31B).layers == (*[LayerAttention(True, 2048)] * 4, LayerAttention(False, None))
    assert read(GEMMA_31B).final_logit_softcapping == 30.0


def test_dflash2_as_published_for_qwen38() -> None:
    config = drafter(
        [5, 19, 33, 47, 61], 248070, hidden_size=5120, intermediate_size=17408, num_target_layers=64,
        architectures=["DFlash2DraftModel"], vocab_size=248320, is_causal=False, block_size=None,
        layer_types=[SLIDING] * 5, sliding_window=2048, use_sliding_window=True, rope_theta=None, rope_scaling=None,
        rope_parameters={"rope_theta": 10000000, "rope_type": "default"},
        nested={"block_size": 8, "conv_group_size": 16, "conv_kernel_size": 2, "selector_rank": 256,
                "selector_top_k": 16},
    )  # fmt: skip
    facts = read(config)
    assert facts.architecture == "DFlash2DraftModel" and facts.unknown_keys == ()
    assert facts.layers == (LayerAttention(False, 2048),) * 5
    assert (facts.block_size, facts.rope_parameters["rope_theta"]) == (8, 1e7)


def test_yarn_said_twice_and_other_block_sizes() -> None:
    """Kimi's drafter: the type under both names, the mask id in both places."""
    scaling = {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "rope_type": "yarn", "type": "yarn",
    }  # fmt: skip
    facts = read(
        drafter(
            [1, 12, 24, 35, 47, 58], 163838, hidden_size=7168, num_hidden_layers=6, num_attention_heads=64,
            num_target_layers=61, rope_scaling=scaling, rope_theta=50000.0, mask_token_id=163838, block_size=8,
            vocab_size=163840, rms_norm_eps=1e-5, max_position_embeddings=262144,
        )
    )  # fmt: skip
    assert facts.rope_parameters["rope_type"] == "yarn" and facts.block_size == 8


def test_gpt_oss_has_biases_and_fewer_taps_than_layers() -> None:
    facts = read(
        drafter(
            [1, 6, 11, 16, 21], 200000, model_type="gpt_oss", attention_bias=True, hidden_size=2880, head_dim=64,
            num_attention_heads=64, num_hidden_layers=8, num_target_layers=24, block_size=8, rms_norm_eps=1e-5,
            rope_scaling={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
        )
    )  # fmt: skip
    assert facts.attention_bias and facts.num_layers == 8 and len(facts.target_layer_ids) == 5


@pytest.mark.parametrize(
    ("nested", "changes", "name"),
    [
        ({"projector_type": "domino", "emb_dim": 256, "gru_hidden_dim": 1024, "shift_label": True}, {}, "domino"),
        (
            {"projector_type": "dspark", "markov_rank": 256, "enable_confidence_head": True},
            {"architectures": ["DSparkDraftModel"]}, "dspark",
        ),
        (  # the same body without the heads: all its slots predict, the anchor's too
            {"markov_rank": 0, "enable_confidence_head": False},
            {"architectures": ["Qwen3DSparkModel"], "block_size": 7}, "DeepSpec's DFlash.*anchor slot predicts too",
        ),
        ({"use_swa": True, "swa_window_size": 1024}, {"attention_sink_bias": True, "layer_types": None}, "sinks"),
    ],
)  # fmt: skip
def test_relatives_are_refused_by_name(nested: dict[str, Any], changes: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=name):
        read(drafter(QWEN3_TAPS, 151669, nested=nested, **changes))

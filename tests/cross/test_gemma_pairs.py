"""Gemma targets multiply their embedding by the root of its width, and so must the drafter's rows be.

The authors' package reads the raw table, so the oracle is told the factor as the drafter's own.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from authors import Authors, differences
from conftest import Make
from pairs import FULL, SLIDING, Pair
from tiny_models import edit_json

from dflash_runtime import GenerationConfig, Session

_DRAFTER = {
    "layer_types": [SLIDING, FULL], "sliding_window": 20, "taps": (0, 2), "block_size": 8,
    "final_logit_softcapping": 30.0, "mask_token_id": 4,
}  # fmt: skip
_SIZES = {"num_hidden_layers": 4, "sliding_window": 16, "final_logit_softcapping": 30.0}
PAIRS = [
    Pair("gemma3", "gemma3_text", {**_SIZES, "head_dim": 16}, _DRAFTER, likely_tokens=4),
    Pair(
        "gemma4",
        "gemma4_text",
        {
            **_SIZES, "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "enable_moe_block": False,
            "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        },
        _DRAFTER,
        likely_tokens=4,
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    "pair", [pytest.param(p, marks=pytest.mark.slow if p.name == "gemma3" else (), id=p.name) for p in PAIRS]
)
def test_every_round_is_the_authors_with_the_factor(exported: Make, pair: Pair, tmp_path: Path) -> None:
    bundle = exported(pair)
    shutil.copytree(bundle.parent / "drafter", tmp_path / "drafter")
    (tmp_path / "target").symlink_to(bundle.parent / "target")
    edit_json(tmp_path / "drafter" / "config.json", input_embedding_scale=8.0)
    authors, plain = Authors(tmp_path), Authors(bundle.parent)
    prompt = list(range(40, 71))
    expected = authors.run(prompt, 24)
    with Session.open(bundle, threads=1, prefill_chunk_tokens=16) as session:
        found = session.generate(prompt, GenerationConfig(max_new_tokens=24, stop_token_ids=[]))
    assert differences(found, expected) == []
    assert plain.run(prompt, 24).proposed_ids != expected.proposed_ids  # without it the proposals are others

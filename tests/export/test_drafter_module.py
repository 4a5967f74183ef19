"""Our drafter against the authors' own module, over rounds of drafting with rejections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from dflash.model import DFlashDraftModel, _crop_to, _make_cache
from torch import Tensor, nn

from dflash_export.drafter import Drafter, draft_without_cache
from dflash_export.drafter_config import read_drafter_config
from dflash_export.drafter_weights import load_drafter, match_drafter_weights
from dflash_export.tensor_files import read_tensor_places

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SLIDING, FULL = "sliding_attention", "full_attention"
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "flat": {"spelling": "flat"},
    "sliding": {"layer_types": [SLIDING, FULL], "sliding_window": 8},
    "sliding-bidirectional": {"layer_types": [SLIDING, SLIDING], "sliding_window": 6, "is_causal": False},
    "causal": {"is_causal": True},
    "bias": {"attention_bias": True},
    "one-kv-head": {"num_key_value_heads": 1, "head_dim": 16},
    "three-taps": {"taps": (3, 0, 1), "layers": 3, "block_size": 6},
    "yarn": {"rope_scaling": YARN, "spelling": "nested"},
    "llama3-flat": {"rope_scaling": LLAMA3, "spelling": "flat"},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "scaled": {"input_embedding_scale": 8.0, "output_multiplier": 0.5, "final_logit_softcapping": 5.0},
    "eps": {"rms_norm_eps": 0.05, "rope_theta": 500000.0},
}
ROUNDS = (1, 4, 2, 3, 1, 4, 4)


def load(folder: Path, table: Tensor, head: Tensor, dtype: torch.dtype = torch.float32) -> Drafter:
    config = read_drafter_config(folder)
    weights = match_drafter_weights(config, read_tensor_places(folder), table.shape[0], str(folder))
    return load_drafter(config, weights, table, head, dtype)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_every_round_equals_the_authors_module(name: str, tmp_path: Path) -> None:
    stated = tiny_models.write_drafter(tmp_path, **CONFIGS[name])
    generator = torch.Generator().manual_seed(7)
    table, head = (0.2 * torch.randn(512, 64, generator=generator) for _ in range(2))
    ours = load(tmp_path, table, head)
    theirs = DFlashDraftModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    lm_head = nn.Linear(64, 512, bias=False)
    lm_head.weight.copy_(head)
    scale = stated.get("input_embedding_scale", 1.0)
    b, K = ours.config.block_size, len(ours.config.target_layer_ids)
    taps = torch.randn(1, 60, K * 64, generator=generator)
    cache = _make_cache(theirs.config)
    done, start = 0, 6
    for committed in ROUNDS:
        ids = torch.full((1, b), ours.config.mask_token_id)
        ids[0, 0] = 17 * start % 500
        hidden = theirs(
            target_hidden=taps[:, done:start],
            noise_embedding=table[ids] * scale,
            position_ids=torch.arange(done, start + b)[None],
            past_key_values=cache,
            use_cache=True,
        )
        _crop_to(cache, start)
        logits = theirs.compute_logits(hidden[:, 1:], lm_head)
        found_hidden, found_logits = draft_without_cache(ours, taps[:, :start], ids)
        torch.testing.assert_close(found_hidden, hidden, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found_logits, logits, rtol=1e-4, atol=1e-4)
        assert torch.equal(found_logits.argmax(-1), logits.argmax(-1))
        done, start = start, start + committed


@torch.no_grad()
def test_a_window_shows_once_the_context_exceeds_it(tmp_path: Path) -> None:
    sliding, full = tmp_path / "sliding", tmp_path / "full"
    tiny_models.write_drafter(sliding, layer_types=[SLIDING, FULL], sliding_window=12, is_causal=False)
    tiny_models.write_drafter(full)
    table = 0.2 * torch.randn(512, 64)
    ids, taps = torch.tensor([[5, 511, 511, 511]]), torch.randn(1, 20, 128)
    one, two = load(sliding, table, table), load(full, table, table)
    for context, same in ((6, True), (20, False)):
        found = [draft_without_cache(drafter, taps[:, :context], ids)[1] for drafter in (one, two)]
        assert torch.allclose(*found, atol=1e-5) is same


@torch.no_grad()
def test_taps_beyond_half_precision_fuse_in_fp32(tmp_path: Path) -> None:
    tiny_models.write_drafter(tmp_path)
    table = 0.2 * torch.randn(512, 64)
    taps = (2e4 * torch.randn(1, 5, 128)).clamp(-6e4, 6e4).half()
    positions = torch.arange(5)[None]
    half, full = load(tmp_path, table, table, torch.float16), load(tmp_path, table, table)
    assert not torch.isfinite(torch.nn.functional.linear(taps, half.fc.weight)).all()
    for found, expected in zip(half.context(taps, positions), full.context(taps.float(), positions), strict=True):
        for one, two in zip(found, expected, strict=True):
            torch.testing.assert_close(one.float(), two, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rope_angles_are_counted_in_fp32(dtype: torch.dtype, tmp_path: Path) -> None:
    tiny_models.write_drafter(tmp_path)
    drafter = load(tmp_path, torch.zeros(512, 64), torch.zeros(512, 64), dtype)
    positions = torch.tensor([[300, 2049, 4099, 15962]])
    exact = positions[0, :, None].double() * (10000.0 ** -(torch.arange(0, 32, 2).double() / 32))
    cosine, sine = drafter.rotation(positions, dtype)
    rounding = torch.finfo(dtype).eps
    assert (cosine[0, 0, :, :16].double() - exact.cos()).abs().max() < rounding + 2e-3
    assert (sine[0, 0, :, 16:].double() - exact.sin()).abs().max() < rounding + 2e-3


@torch.no_grad()
def test_tables_of_its_own_replace_the_borrowed_ones(tmp_path: Path) -> None:
    own = {"embed_tokens.weight": 0.2 * torch.randn(512, 64), "lm_head.weight": 0.2 * torch.randn(512, 64)}
    tiny_models.write_drafter(tmp_path / "own", tensors=own)
    tiny_models.write_drafter(tmp_path / "borrowing")
    other = torch.zeros(512, 64)
    ids, taps = torch.tensor([[5, 511, 511, 511]]), torch.randn(1, 9, 128)
    found = draft_without_cache(load(tmp_path / "own", other, other), taps, ids)[1]
    tables = (own["embed_tokens.weight"], own["lm_head.weight"])
    expected = draft_without_cache(load(tmp_path / "borrowing", *tables), taps, ids)[1]
    assert torch.equal(found, expected)

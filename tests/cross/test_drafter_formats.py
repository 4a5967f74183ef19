"""Drafters written by the libraries their formats belong to say what the same weights say in z-lab's format.

The checkpoints lie in `drafter_formats/`, with the script that made them. The oracle is the authors' package, which
reads z-lab's format alone: what each format means in it is written out here, apart from the exporter's own reading.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from authors import Authors, differences
from conftest import Once
from drafter_formats.format_target import SIZES, TARGET
from pairs import FULL, SLIDING, quiet
from safetensors.torch import load_file, save_file
from tiny_models import edit_json, favour_few_tokens, write_target

from dflash_engines.ort_cpu import lower_bundle
from dflash_export.add_drafter import plan_addition, write_with_drafter
from dflash_export.build import export_bundle
from dflash_export.build_plan import BuildOptions, plan_build
from dflash_export.drafter_config import DrafterConfig, read_drafter_config
from dflash_export.drafter_weights import match_drafter_weights
from dflash_export.tensor_files import read_tensor_places
from dflash_runtime import CheckpointError, GenerationConfig, PairError, Session, UnsupportedModelError
from dflash_runtime.bundle import Bundle
from dflash_runtime.errors import DFlashError

FORMATS = Path(__file__).parent / "drafter_formats"
MIXED = {"layer_types": [SLIDING, FULL], "sliding_window": 12, "use_sliding_window": True}
COMMON: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", **SIZES, "num_hidden_layers": 2, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "max_position_embeddings": 512, "vocab_size": 272, "num_target_layers": 6, "block_size": 8,
    "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip
TAPS = {"target_layer_ids": [0, 2], "mask_token_id": 271}
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 8, "selector_top_k": 6}
MEANING: dict[str, dict[str, Any]] = {
    "specforge": {**COMMON, **MIXED, "attention_bias": True, "dflash_config": TAPS},
    "speculators": {**COMMON, **MIXED, "dflash_config": TAPS},
    "speculators-reduced": {**COMMON, **MIXED, "is_causal": False, "dflash_config": TAPS},
    "speculators-dflash2": {
        **COMMON, **DFLASH2, "architectures": ["DFlash2DraftModel"], "layer_types": [SLIDING, SLIDING],
        "sliding_window": 12, "use_sliding_window": True, "is_causal": False, "dflash_config": TAPS,
    },
    "modelopt": {
        **COMMON, "layer_types": [SLIDING, SLIDING], "sliding_window": 12, "use_sliding_window": True,
        "is_causal": False, "dflash_config": {"target_layer_ids": [1, 3], "mask_token_id": 271},
    },
    "assistant": {**COMMON, **MIXED, "is_causal": False, "dflash_config": TAPS},
}  # fmt: skip
RENAMED = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
OWN_HEAD = ("lm_head.weight", "d2t", "t2d")
SAME = (
    "layers", "target_layer_ids", "block_size", "mask_token_id", "rope_parameters", "num_layers", "hidden_size",
    "head_dim", "num_heads", "num_kv_heads", "attention_bias", "rms_norm_eps", "dflash2", "architecture",
)  # fmt: skip


def meant(name: str, folder: Path) -> None:
    """The same weights in z-lab's format, without a head of their own."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(MEANING[name]), encoding="utf-8")
    tensors = load_file(FORMATS / name / "model.safetensors")
    kept = {RENAMED.get(k, k): v for k, v in tensors.items() if k not in OWN_HEAD}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def make_target(folder: Path) -> None:
    """The target's checkpoint, and a bundle of it alone."""
    write_target(folder / "target", "qwen3", **TARGET)
    favour_few_tokens(folder / "target", 5)
    (folder / "bundle").mkdir()
    export_bundle(plan_build(BuildOptions(str(folder / "target"))), folder / "bundle", quiet)


def make_pair(name: str, target: Path, folder: Path) -> None:
    """The bundle with the drafter as its library wrote it, and the z-lab twin in a folder of its own."""
    alone = Bundle.open(target / "bundle")
    (folder / "bundle").mkdir()
    write_with_drafter(alone, plan_addition(alone, str(FORMATS / name)), folder / "bundle", quiet)
    lower_bundle(folder / "bundle")
    meant(name, folder / "zlab" / "drafter")
    (folder / "zlab" / "target").symlink_to(target / "target")


def propose_from_own_head(authors: Authors, drafter: Path) -> None:
    """Lets the authors' loop draft from a head over part of the vocabulary, all other tokens being impossible."""
    tensors = load_file(drafter / "model.safetensors")
    ids = tensors["t2d"].nonzero().flatten()

    def logits(hidden: torch.Tensor, head: Any) -> torch.Tensor:
        own = hidden @ tensors["lm_head.weight"].float().T
        return torch.full((*hidden.shape[:-1], 272), -torch.inf).index_copy(-1, ids, own)

    authors.drafter.compute_logits = logits


@pytest.mark.parametrize("name", MEANING)
def test_every_round_is_that_of_the_same_weights_in_zlab_format(once: Once, name: str) -> None:
    target = once("format-target", make_target)
    folder = once(f"format-{name}", lambda place: make_pair(name, target, place))
    authors = Authors(folder / "zlab")
    if name == "speculators-reduced":
        propose_from_own_head(authors, FORMATS / name)
    proposed: set[int] = set()
    with Session.open(folder / "bundle", threads=1, prefill_chunk_tokens=16) as session:
        for prompt in ([5], list(range(40, 71))):
            expected = authors.run(prompt, 24)
            found = session.generate(prompt, GenerationConfig(max_new_tokens=24, stop_token_ids=[]))
            assert differences(found, expected) == []
            proposed |= {i for round_ in expected.proposed_ids for i in round_}
        options = GenerationConfig(max_new_tokens=24, stop_token_ids=[], temperature=0.8, seed=2)
        texts = [session.generate([5], dataclasses.replace(options, **how)).token_ids
                 for how in ({"plain": True}, {"proposals": "coupled"})]  # fmt: skip
        assert texts[0] == texts[1]
        drawn = session.generate([5], dataclasses.replace(options, proposals="sampled"))
        drafted: Any = session._backend.outputs("drafter", 3)
    if name == "speculators-reduced":
        assert max(proposed) > 96  # ids of the target, not rows of the drafter's head
        (vocabulary,) = drafted["draft_vocabulary"]
        assert (vocabulary[drafted["draft_logits"].argmax(-1)] == drafted["draft_ids"]).all()
        assert {i for round_ in drawn.proposed_ids for i in round_} <= set(vocabulary.tolist())


@pytest.mark.parametrize("name", MEANING)
def test_config_and_tensors_are_read_as_meant(name: str, tmp_path: Path) -> None:
    meant(name, tmp_path / "zlab")
    found, expected = read_drafter_config(FORMATS / name), read_drafter_config(tmp_path / "zlab")
    assert [(n, getattr(found, n)) for n in SAME] == [(n, getattr(expected, n)) for n in SAME]
    assert found.unknown_keys == ()
    assert found.made_for == ("somebody/tiny-qwen3" if name.startswith("speculators") else None)
    own = match_drafter_weights(found, read_tensor_places(FORMATS / name), 272, name)
    twin = match_drafter_weights(expected, read_tensor_places(tmp_path / "zlab"), 272, name)
    content = {n: b"".join(p.chunks()) for n, p in own.places.items() if n != "lm_head.weight"}
    assert content == {n: b"".join(p.chunks()) for n, p in twin.places.items()}


def test_the_written_checkpoints_are_what_their_libraries_write() -> None:
    """Markers that would be gone if these files had been written by anything else."""
    configs = {name: json.loads((FORMATS / name / "config.json").read_text()) for name in MEANING}
    assert configs["specforge"]["transformers_version"] and "draft_vocab_size" in configs["specforge"]
    assert all(configs[name]["speculators_version"] == "0.9.0" for name in MEANING if name.startswith("speculators"))
    assert configs["modelopt"]["dflash_config"]["use_swa"] is True
    assert set(configs["modelopt"]["layer_types"]) == {FULL}
    assert configs["assistant"]["architectures"] == ["MuseGlimmerAssistantModel"]


@pytest.fixture
def change(tmp_path: Path) -> Callable[..., DrafterConfig]:
    """Copies a checkpoint, changes its config or tensors, and reads it."""

    def run(name: str, tensors: dict[str, Any] | None = None, **keys: Any) -> DrafterConfig:
        folder = shutil.copytree(FORMATS / name, tmp_path / "changed", dirs_exist_ok=True)
        edit_json(folder / "config.json", **keys)
        kept = {**load_file(folder / "model.safetensors"), **(tensors or {})}
        save_file({n: t for n, t in kept.items() if t is not None}, folder / "model.safetensors")
        config = read_drafter_config(folder)
        match_drafter_weights(config, read_tensor_places(folder), 272, "dr")
        return config

    return run


@pytest.mark.parametrize(
    ("keys", "error", "words"),
    [
        ({"sample_from_anchor": True}, UnsupportedModelError, "anchor slot predicts too (sample_from_anchor)"),
        ({"speculators_model_type": "dspark"}, UnsupportedModelError, "speculators drafter of type dspark"),
        ({"speculators_model_type": "eagle3"}, UnsupportedModelError, "speculators drafter of type eagle3"),
        ({"aux_hidden_state_layer_ids": [0, 3]}, UnsupportedModelError, "taps the embedding output (0)"),
        ({"aux_hidden_state_layer_ids": None}, CheckpointError, "does not state which target layers"),
        ({"transformer_layer_config": None}, CheckpointError, "no transformer_layer_config"),
        ({"block_size": None}, CheckpointError, "does not state block_size"),
        ({"mask_token_id": None}, CheckpointError, "does not state mask_token_id"),
    ],
)
def test_speculators_that_are_refused(
    change: Callable[..., DrafterConfig], keys: dict[str, Any], error: type[DFlashError], words: str
) -> None:
    with pytest.raises(error) as caught:
        change("speculators", **keys)
    assert words in str(caught.value)


def test_what_a_speculators_drafter_may_carry(change: Callable[..., DrafterConfig]) -> None:
    """Parts of the target that its training keeps are no part of the drafter; a new key is remembered."""
    extra = {"verifier_norm.weight": torch.ones(32), "verifier_lm_head.weight": torch.ones(272, 32)}
    assert change("speculators", extra, gate_temperature=2.0).unknown_keys == ("gate_temperature",)


@pytest.mark.parametrize(
    ("d2t", "t2d", "words"),
    [
        (None, "same", "no tensor d2t"),
        (torch.full((96,), 500), "same", "leads to the target's ids 500 to 595, and the target has 0 to 271"),
        (torch.zeros(96, dtype=torch.int64), "same", "contradicts itself: t2d marks 96"),
        (torch.arange(96).flip(0), None, "not ascending"),
        (torch.zeros(96), None, "tensor of F32 [96]"),
        (torch.zeros(95, dtype=torch.int64), None, "tensor of I64 [95]"),
    ],
)
def test_a_mapping_that_cannot_be_right(
    change: Callable[..., DrafterConfig], d2t: Any, t2d: str | None, words: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        change("speculators-reduced", {"d2t": d2t, **({} if t2d else {"t2d": None})})
    assert words in str(caught.value)


def test_a_smaller_head_without_its_own_rows_is_not_replaced_by_the_targets(
    change: Callable[..., DrafterConfig],
) -> None:
    with pytest.raises(CheckpointError, match=r"lacks 1 of .* tensors its config asks for: lm_head\.weight"):
        change("speculators-reduced", {"lm_head.weight": None})


def test_copies_of_the_targets_tables_are_borrowed(tmp_path: Path) -> None:
    """Older versions of speculators store embedding and head with the drafter; a bundle holds each once."""
    write_target(tmp_path / "target", "qwen3", **TARGET)
    tables = load_file(tmp_path / "target" / "model.safetensors")
    shutil.copytree(FORMATS / "speculators", tmp_path / "drafter")
    own = load_file(tmp_path / "drafter" / "model.safetensors")
    other = tables["lm_head.weight"].clone()
    other[100, 3] += 1
    embedding = {"embed_tokens.weight": tables["model.embed_tokens.weight"]}
    for head, borrowed in ((tables["lm_head.weight"], True), (other, False)):
        file = tmp_path / "drafter" / "model.safetensors"
        save_file(
            {
                **own,
                **embedding,
                "lm_head.weight": head.contiguous(),
                "verifier_norm.weight": own["norm.weight"].clone(),
            },
            file,
        )
        plan = plan_build(BuildOptions(str(tmp_path / "target"), str(tmp_path / "drafter"))).drafter
        assert plan is not None
        assert plan.weights.table_names("e", "h") == ("e", "h" if borrowed else "drafter.lm_head.weight")
        assert any("verifier_norm.weight, embed_tokens.weight" in note for note in plan.notes)


def test_dflash2_under_the_plain_name_is_still_dflash2(change: Callable[..., DrafterConfig]) -> None:
    """Re-saving tools wrote the plain architecture over it; its selector must not be skipped."""
    assert change("speculators-dflash2").dflash2 is not None
    facts = dataclasses.asdict(change("speculators-dflash2"))
    assert facts["dflash2"] == {**DFLASH2}


def test_taps_beyond_the_target_name_both_countings(tmp_path: Path) -> None:
    write_target(tmp_path / "target", "qwen3", **TARGET)
    shutil.copytree(FORMATS / "speculators", tmp_path / "drafter")
    edit_json(tmp_path / "drafter" / "config.json", aux_hidden_state_layer_ids=[1, 7])
    with pytest.raises(PairError, match=r"\[0, 6\] and the target has 6 .* from 1, as \[1, 7\]"):
        plan_build(BuildOptions(str(tmp_path / "target"), str(tmp_path / "drafter")))

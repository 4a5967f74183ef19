"""What would only show as low acceptance is found before anything is built, with its consequence and its remedy."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from tiny_models import edit_json, write_drafter, write_target

from dflash_export.build_plan import BuildOptions, plan_build
from dflash_export.catalog import CATALOG
from dflash_export.drafter_config import read_drafter_config
from dflash_export.pair_check import embedding_scale
from dflash_export.pair_findings import ERROR, NOTE, WARNING, Finding, TargetSide
from dflash_export.pair_report import PairReport, examine_pair
from dflash_export.pair_text_check import text_findings
from dflash_export.tensor_files import TensorPlace, read_tensor_places
from dflash_runtime.errors import CheckpointError, PairError

Examine = Callable[..., PairReport]
THINKING_TEMPLATE = "{% if enable_thinking %}<think>{% endif %}{{ messages[0].content }}"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair") / "target"
    write_target(folder)
    return folder


@pytest.fixture
def examine(target: Path, tmp_path: Path) -> Examine:
    """Writes a drafter and looks at the pair."""

    def run(options: dict[str, Any] | None = None, *, of: Path = target, **stated: Any) -> PairReport:
        write_drafter(tmp_path / "drafter", **stated)
        return examine_pair(str(of), str(tmp_path / "drafter"), **(options or {}))

    return run


def only(report: PairReport) -> Finding:
    assert len(report.findings) == 1, [one.sentence() for one in report.findings]
    return report.findings[0]


def test_a_fitting_pair_has_no_findings(examine: Examine) -> None:
    report = examine()
    assert report.findings == [] and report.worst is None
    assert report.drafter["num_draft_tokens"] == 3  # block size 4 is the anchor and three proposals
    assert report.target["num_layers"] == 4


@pytest.mark.parametrize(
    ("stated", "severity", "subject", "words"),
    [
        ({"mask_token_id": 600}, ERROR, "mask id", "600 and the target's embedding has 512 rows"),
        ({"mask_token_id": 257}, WARNING, "mask id", "257 is '<eos>', a stop token of the target"),
        ({"mask_token_id": 65}, WARNING, "mask id", "65 is 'A', an ordinary token of the target's texts"),
        ({"mask_token_id": 256}, NOTE, "mask id", "256 is the target's special token '<bos>'"),
        ({"taps": (0, 3)}, NOTE, "taps", "taps the last layer (3): its raw output"),
        ({"rope_theta": 1e6}, WARNING, "rope", "rotary embedding is 1e+06 and the target's is 10000"),
        ({"num_target_layers": 36}, ERROR, "taps", "target of 36 layers (num_target_layers) and this one has 4"),
        ({"block_size": 1}, ERROR, "block", "block_size is 1"),
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3}, ERROR, "window",
            "window is 3 tokens and a block has 4",
        ),
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9, "is_causal": False}, NOTE, "window",
            "see each other both ways",
        ),
        ({**tiny_models.DFLASH2, "selector_top_k": 600}, ERROR, "vocabulary", "selector_top_k is 600"),
        ({"max_position_embeddings": 512, "architectures": ["DominoModel"]}, ERROR, "drafter", "Domino"),
        ({"attention_bias": None}, ERROR, "drafter", "k_proj.bias"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)  # fmt: skip
def test_each_fault_is_found(
    examine: Examine, tmp_path: Path, stated: dict[str, Any], severity: str, subject: str, words: str
) -> None:
    if stated == {"attention_bias": None}:
        report = examine(attention_bias=True)
        edit_json(tmp_path / "drafter" / "config.json", attention_bias=False)
        report = examine_pair(str(report.target["id"]), str(tmp_path / "drafter"))
    else:
        report = examine(**stated)
    finding = only(report)
    assert (finding.severity, finding.subject) == (severity, subject)
    assert words in finding.text
    assert severity != WARNING or (finding.consequence and finding.remedy)


def test_taps_counted_from_one_are_suspected(examine: Examine, tmp_path: Path) -> None:
    write_target(tmp_path / "deep", num_hidden_layers=8)
    assert examine(of=tmp_path / "deep", taps=(1, 5), num_target_layers=8).findings == []  # the authors' rule
    finding = only(examine(of=tmp_path / "deep", taps=(2, 6), num_target_layers=8))
    assert finding.severity == WARNING
    assert "[2, 6], each one above the usual [1, 5]: they look counted from 1" in finding.text


def test_a_larger_block_than_the_drafters_is_warned_of(examine: Examine) -> None:
    finding = only(examine({"block_sizes": (8,)}))
    assert (
        finding.severity == WARNING
        and "block of 8 tokens is asked for and the drafter was trained for 4" in finding.text
    )
    two = examine({"block_sizes": (80,)}, **tiny_models.DFLASH2).findings
    assert any(one.severity == ERROR and "79 slots" in one.text for one in two)


def test_more_context_than_the_drafter_was_made_for(examine: Examine) -> None:
    assert (
        "context is 300 tokens and the drafter was made for 200"
        in only(examine({"max_context_tokens": 300}, max_position_embeddings=200)).text
    )


def test_unknown_keys_of_a_drafter_are_named(examine: Examine, tmp_path: Path) -> None:
    report = examine()
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    config["dflash_config"]["noise_gate"] = 0.5
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(config))
    finding = only(examine_pair(report.target["id"], str(tmp_path / "drafter")))
    assert finding.severity == WARNING and "dflash_config.noise_gate" in finding.text


def test_tokenizers_are_compared_word_by_word(examine: Examine, target: Path, tmp_path: Path) -> None:
    def again() -> PairReport:
        return examine_pair(str(target), str(tmp_path / "drafter"))

    examine()
    file = tmp_path / "drafter" / "tokenizer.json"
    shutil.copyfile(target / "tokenizer.json", file)
    assert again().findings == []
    data = json.loads(file.read_text(encoding="utf-8"))
    mask = {**data["added_tokens"][0], "id": 259, "content": "<|MASK|>"}
    file.write_text(json.dumps({**data, "added_tokens": [*data["added_tokens"], mask]}), encoding="utf-8")
    assert "tokenizer has 260 tokens and the target's 259" in only(again()).text
    assert examine(mask_token_id=259).findings == []  # the mask token may be known to one of them only
    data["model"]["vocab"] = {token: (i ^ 1 if i < 256 else i) for token, i in data["model"]["vocab"].items()}
    file.write_text(json.dumps(data), encoding="utf-8")
    assert "256 ids different meanings, the first is 0" in only(again()).text


@pytest.fixture
def thinker(target: Path, tmp_path: Path) -> Path:
    folder = shutil.copytree(target, tmp_path / "thinker")
    (folder / "chat_template.jinja").write_text(THINKING_TEMPLATE)
    return folder


def test_an_unknown_thinking_mode_is_a_note(examine: Examine, thinker: Path) -> None:
    finding = only(examine(of=thinker))
    assert (finding.severity, finding.subject) == (NOTE, "thinking")
    assert "enable_thinking=false" in finding.remedy and "60 %" in finding.consequence
    assert examine({"template_args": {"enable_thinking": False}}, of=thinker).findings == []


def test_a_drafter_of_the_other_thinking_mode_is_warned_of(examine: Examine, thinker: Path, tmp_path: Path) -> None:
    """The record of its training data, or the catalog, says how it was trained."""
    examine(of=thinker)
    record = tmp_path / "drafter" / "data.json"
    record.write_text(json.dumps({"template_args": {"enable_thinking": False}}))
    assert examine_pair(str(thinker), str(tmp_path / "drafter")).findings == []
    finding = only(examine_pair(str(thinker), str(tmp_path / "drafter"), template_args={"enable_thinking": True}))
    assert finding.severity == WARNING
    assert "trained without thinking, and the texts will be with thinking" in finding.text


def of_catalog(folder: Path, drafter: Path, name: str, **side: Any) -> list[Finding]:
    facts = {"num_layers": 4, "hidden_size": 64, "vocab_size": 512, "model_type": "qwen3", **side}
    known = TargetSide(facts.pop("target", "Qwen/Qwen3-4B"), folder, **facts)
    entry = CATALOG[name].drafter
    assert entry is not None
    return text_findings(known, read_drafter_config(drafter), drafter, entry, {"enable_thinking": False})


def test_a_published_drafter_that_changed_under_its_name(target: Path, tmp_path: Path) -> None:
    write_drafter(tmp_path / "d", block_size=16, mask_token_id=511)
    texts = [one.text for one in of_catalog(target, tmp_path / "d", "qwen3-4b")]
    assert any("states target_layer_ids [0, 2], and [1, 9, 17, 25, 33] is known of it" in text for text in texts)
    assert any("states mask_token_id 511, and 151669 is known" in text for text in texts)
    assert not any("block_size" in text for text in texts)
    other = of_catalog(target, tmp_path / "d", "qwen3-4b", target="somebody/Qwen3-4B-finetuned")
    assert any(
        "was published for Qwen/Qwen3-4B, and the target is somebody/Qwen3-4B-finetuned" in o.text for o in other
    )


def test_a_draft_vocabulary_without_stop_tokens_is_noted(target: Path, tmp_path: Path) -> None:
    write_drafter(tmp_path / "d")
    side = TargetSide("t", target, 4, 64, 512, "qwen3", stop_token_ids=(257, 258))
    for ids, expected in ((torch.arange(256), 1), (torch.arange(258), 0)):
        found = text_findings(side, read_drafter_config(tmp_path / "d"), tmp_path / "d", "x", {}, ids)
        assert len(found) == expected


def test_a_gemma_target_scales_the_drafters_embedding(tmp_path: Path) -> None:
    write_target(tmp_path / "target", "gemma3_text", num_hidden_layers=4, head_dim=16, sliding_window=16)
    write_drafter(tmp_path / "drafter")
    plan = plan_build(BuildOptions(str(tmp_path / "target"), str(tmp_path / "drafter")))
    assert plan.drafter is not None
    assert plan.drafter.config.input_embedding_scale == 8.0  # the root of 64
    assert any("multiplies its embedding by the root of its width" in note for note in plan.notes)
    config = dataclasses.replace(read_drafter_config(tmp_path / "drafter"), layout="speculators")
    side = TargetSide("t", tmp_path, 4, 64, 512, "gemma4_text")
    assert (embedding_scale(side, config), embedding_scale(side, dataclasses.replace(config, layout="z-lab"))) == (1, 8)
    half = TensorPlace(tmp_path, 0, 0, "BF16", ())
    assert dataclasses.replace(side, hidden_size=5376, embedding=half).width_root == 73.5  # as the module rounds it


def test_linear_attention_targets_are_refused_by_name(tmp_path: Path, target: Path) -> None:
    folder = tmp_path / "hybrid"
    folder.mkdir()
    from transformers import Qwen3NextConfig

    Qwen3NextConfig(num_hidden_layers=4, hidden_size=64, vocab_size=512).save_pretrained(folder)
    write_drafter(tmp_path / "drafter")
    finding = only(examine_pair(str(folder), str(tmp_path / "drafter")))
    assert finding.severity == ERROR and "linear_attention" in finding.text and "rolled back" in finding.text


def test_a_build_stops_at_errors_and_tells_warnings(examine: Examine, target: Path, tmp_path: Path) -> None:
    examine(mask_token_id=257)
    plan = plan_build(BuildOptions(str(target), str(tmp_path / "drafter")))
    assert any(note.startswith("warning: mask_token_id 257") for note in plan.notes)
    examine(mask_token_id=600, taps=(0, 7))
    with pytest.raises(PairError, match=r"mask_token_id is 600.* Also: .*\[0, 7\]"):
        plan_build(BuildOptions(str(target), str(tmp_path / "drafter")))


def test_without_a_drafter_there_is_no_pair() -> None:
    with pytest.raises(CheckpointError, match=r"knows none for qwen2-7b: nobody has published"):
        examine_pair("qwen2-7b", None)


def test_the_targets_weights_are_not_needed(target: Path, examine: Examine, tmp_path: Path) -> None:
    bare = shutil.copytree(target, tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    assert examine(of=bare).findings == []
    assert read_tensor_places(target)
    (bare / "tokenizer.json").unlink()
    finding = only(examine(of=bare))
    assert finding.severity == NOTE and "mask id and tokenizers were not looked at" in finding.text

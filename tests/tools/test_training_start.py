"""First weights of a training: an earlier drafter's, the target's own, and what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import write_target
from training_files import few_steps, write_random_answers, write_training_files

import dflash_tools.training_run
from dflash_export.build_plan import BuildOptions, plan_build
from dflash_export.drafter_data_record import DATA_RECORD, recorded_template_args
from dflash_runtime.errors import CheckpointError, DFlashError, PairError, UnsupportedModelError
from dflash_tools.drafter_card import card_text
from dflash_tools.new_drafter import own_parameters
from dflash_tools.training_run import TrainOptions
from dflash_tools.training_start import read_earlier_drafter


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with answers, and a drafter trained on them with taps that are not the default."""
    folder = tmp_path_factory.mktemp("start")
    write_training_files(folder)
    few_steps(folder, folder / "earlier", layer_ids=(1, 3), peak_learning_rate=1e-2)
    return folder


@pytest.fixture
def first_weights(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Filled with the drafter's weights as the training gets them."""
    seen: dict[str, torch.Tensor] = {}
    real = dflash_tools.training_run.Training

    def watching(drafter: Any, *rest: Any) -> Any:
        seen.update({name: p.detach().clone() for name, p in own_parameters(drafter).items()})
        return real(drafter, *rest)

    monkeypatch.setattr(dflash_tools.training_run, "Training", watching)
    return seen


def go_on(files: Path, out: Path, **changes: Any) -> Any:
    return few_steps(files, out, num_layers=None, block_size=None, **changes)


def test_from_takes_weights_and_shape_of_the_earlier_drafter(
    files: Path, tmp_path: Path, first_weights: dict[str, torch.Tensor]
) -> None:
    result = go_on(files, tmp_path / "drafter", earlier=str(files / "earlier"))
    stored = load_file(files / "earlier" / "model.safetensors")
    assert first_weights.keys() == stored.keys()
    assert all(torch.equal(first_weights[name], tensor) for name, tensor in stored.items())
    assert result.config["dflash_config"]["target_layer_ids"] == [1, 3]
    assert (result.config["num_hidden_layers"], result.config["block_size"]) == (2, 4)
    after = load_file(tmp_path / "drafter" / "model.safetensors")
    assert not any(torch.equal(after[name], tensor) for name, tensor in stored.items())


def test_from_takes_weights_stored_in_bf16(files: Path, tmp_path: Path, first_weights: dict[str, torch.Tensor]) -> None:
    few_steps(files, tmp_path / "short", layer_ids=(1, 3), dtype="bf16")
    go_on(files, tmp_path / "drafter", earlier=str(tmp_path / "short"))
    stored = load_file(tmp_path / "short" / "model.safetensors")
    assert all(t.dtype == torch.bfloat16 for t in stored.values())
    assert all(torch.equal(first_weights[name], tensor.float()) for name, tensor in stored.items())


def test_the_block_size_may_change(files: Path, tmp_path: Path) -> None:
    result = few_steps(files, tmp_path / "drafter", num_layers=None, block_size=8, earlier=str(files / "earlier"))
    assert result.config["block_size"] == 8


def test_a_fresh_optimiser_starts_at_the_lowest_rate(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    real = dflash_tools.training_loop.learning_rate

    def watching(step: int, *rest: Any) -> float:
        steps.append(step)
        return float(real(step, *rest))

    monkeypatch.setattr(dflash_tools.training_loop, "learning_rate", watching)
    go_on(files, tmp_path / "drafter", earlier=str(files / "earlier"))
    assert steps == list(range(8))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"num_layers": 3}, r"--layers is 3 and --from .* has 2"),
        ({"layer_ids": (1, 4)}, r"--taps is \(1, 4\) and --from .* has \(1, 3\)"),
        ({"mask_token_id": 300}, "--mask-token-id is 300"),
    ],
)
def test_another_shape_than_the_earlier_drafters_is_refused(
    files: Path, tmp_path: Path, changes: dict[str, Any], word: str
) -> None:
    values = {"num_layers": None, "block_size": None, "earlier": str(files / "earlier"), **changes}
    with pytest.raises(PairError, match=word):
        few_steps(files, tmp_path / "drafter", **values)
    assert not (tmp_path / "drafter").exists()


def test_an_earlier_drafter_of_another_size_is_refused(files: Path, tmp_path: Path) -> None:
    write_target(tmp_path / "target", num_hidden_layers=6, hidden_size=96, num_attention_heads=6)
    write_random_answers(tmp_path / "answers.jsonl")
    with pytest.raises(CheckpointError, match=r"fc.weight is \[64, 128\], and this training asks for \[96, 192\]"):
        go_on(tmp_path, tmp_path / "drafter", earlier=str(files / "earlier"))


def test_a_resumed_training_must_have_started_from_the_same(files: Path, tmp_path: Path) -> None:
    first = go_on(files, tmp_path / "drafter", earlier=str(files / "earlier"), stop_after_s=0.0)
    assert not first.complete
    assert go_on(files, tmp_path / "drafter", earlier=str(files / "earlier"), stop_after_s=0.0, resume=True).step == 2
    with pytest.raises(CheckpointError, match="start was"):
        few_steps(files, tmp_path / "drafter", layer_ids=(1, 3), resume=True)


def test_init_target_copies_the_last_layers(
    files: Path, tmp_path: Path, first_weights: dict[str, torch.Tensor]
) -> None:
    few_steps(files, tmp_path / "drafter", init="target")
    target = load_file(files / "target" / "model.safetensors")
    for i, layer in ((0, 4), (1, 5)):
        ours, theirs = f"layers.{i}.", f"model.layers.{layer}."
        for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm"):
            assert torch.equal(first_weights[f"{ours}{name}.weight"], target[f"{theirs}{name}.weight"])
        norm = target[f"{theirs}input_layernorm.weight"]
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
            expected = target[f"{theirs}{name}.weight"] * norm
            torch.testing.assert_close(first_weights[f"{ours}{name}.weight"], expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(first_weights[f"{ours}input_layernorm.weight"], torch.ones(64))
        assert torch.equal(first_weights[f"{ours}self_attn.q_norm.weight"], target[f"{theirs}self_attn.q_norm.weight"])
    torch.testing.assert_close(first_weights["norm.weight"], target["model.norm.weight"], rtol=1e-4, atol=1e-5)


def test_init_target_gives_queries_and_keys_their_usual_size_where_the_target_has_no_norm_for_it(
    tmp_path: Path, first_weights: dict[str, torch.Tensor]
) -> None:
    write_target(tmp_path / "target", "llama", num_hidden_layers=6)
    write_random_answers(tmp_path / "answers.jsonl")
    few_steps(tmp_path, tmp_path / "drafter", init="target")
    for name in ("q_norm", "k_norm"):
        weight = first_weights[f"layers.1.self_attn.{name}.weight"]
        assert len(weight.unique()) == 1
        assert 0.1 < float(weight[0]) < 20
        assert float(weight[0]) != 1.0


def test_init_target_is_refused_where_layers_are_built_otherwise(tmp_path: Path) -> None:
    write_target(tmp_path / "target", "olmo2", num_hidden_layers=6)  # norms behind the blocks
    write_random_answers(tmp_path / "answers.jsonl")
    with pytest.raises(UnsupportedModelError, match="--init target"):
        few_steps(tmp_path, tmp_path / "drafter", init="target")


def test_the_card_says_where_the_weights_came_from(files: Path, tmp_path: Path) -> None:
    earlier = str(files / "earlier")
    result = go_on(files, tmp_path / "drafter", earlier=earlier)
    options = TrainOptions(str(files / "target"), (files / "answers.jsonl",), tmp_path / "drafter", earlier=earlier)
    card = card_text(options, result, ["dflash-export"])
    assert f"those of the drafter `earlier`, SHA-256 of its tensors {read_earlier_drafter(earlier).sha256}" in card
    assert "| block size | 4, anchor included |" in card


def test_template_arguments_of_the_data_reach_the_bundles_of_the_drafter(files: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "answers.jsonl").write_bytes((files / "answers.jsonl").read_bytes())
    made = {"target": str(files), "template_args": {"enable_thinking": True}, "temperature": 0.0}
    (data / "data.json").write_text(json.dumps(made), encoding="utf-8")
    few_steps(files, tmp_path / "drafter", data=data)
    assert json.loads((tmp_path / "drafter" / DATA_RECORD).read_text(encoding="utf-8")) == {
        "template_args": {"enable_thinking": True}, "temperature": 0.0,
    }  # fmt: skip
    pair = (str(files / "target"), str(tmp_path / "drafter"))
    assert plan_build(BuildOptions(*pair)).template_args() == {"enable_thinking": True}
    asked = BuildOptions(*pair, template_args={"enable_thinking": False})
    assert plan_build(asked).template_args() == {"enable_thinking": False}  # the user's word goes first
    assert plan_build(BuildOptions(pair[0], str(files / "earlier"))).template_args() == {}


@pytest.mark.parametrize("content", ["no json", '{"template_args": [1]}'])
def test_a_damaged_record_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / DATA_RECORD).write_text(content, encoding="utf-8")
    with pytest.raises(DFlashError, match=DATA_RECORD):
        recorded_template_args(tmp_path)

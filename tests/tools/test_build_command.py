"""The whole command on a tiny checkpoint: build, add-drafter, engines, run, inspect."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_calls import Invoke, Launch
from safetensors.numpy import load_file
from tiny_models import write_drafter, write_target
from transformers import AutoConfig

from dflash_tools.random_drafter import write_random_drafter


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny-llama"
    write_target(folder, "llama")
    return folder


def test_build_then_run_both_ways(launch: Launch, invoke: Invoke, target: Path, tmp_path: Path) -> None:
    drafter, out = tmp_path / "drafter", tmp_path / "a bundle"
    write_random_drafter(target, drafter, num_layers=1, block_size=4)
    built = launch("build", "--target", target, "--drafter", drafter, "--out", out, "--max-context", 64, "--json")
    assert built.returncode == 0, built.stderr
    report = json.loads(built.stdout)
    assert report["has_drafter"]
    assert report["engines"] == ["ort-cpu"]
    assert report["max_context_tokens"] == 64
    assert report["peak_memory_bytes"] > 0
    assert {row["stage"] for row in report["checks"]} >= {"portable", "lowered", "tokens"}
    assert all(row["passed"] for row in report["checks"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a bundle", "drafter"]  # nothing half-made stays
    plain, drafted = (
        json.loads(invoke("run", out, "hello", "--json", "--max-new-tokens", 16, *mode).stdout)
        for mode in ([], ["--plain"])
    )
    assert plain["token_ids"] == drafted["token_ids"]
    assert invoke("inspect", out, "--verify").exit_code == 0


def test_a_drafter_can_follow_the_target(invoke: Invoke, target: Path, tmp_path: Path) -> None:
    drafter, out = tmp_path / "drafter", tmp_path / "bundle"
    write_random_drafter(target, drafter, num_layers=1, block_size=4, seed=3)
    built = invoke("build", "--target", target, "--out", out, "--max-context", 64, "--backend", "none")
    assert built.exit_code == 0, built.stderr
    assert "add-drafter" in built.stdout
    refused = invoke("run", out, "hello")
    assert refused.exit_code == 1
    assert "dflash-export engines" in refused.stderr
    assert invoke("engines", out).exit_code == 0
    before = json.loads(invoke("run", out, "hello", "--json", "--max-new-tokens", 16).stdout)
    assert before["num_drafts"] == 0
    added = invoke("add-drafter", out, drafter)
    assert added.exit_code == 0, added.stderr
    after = json.loads(invoke("run", out, "hello", "--json", "--max-new-tokens", 16).stdout)
    assert after["num_drafts"] > 0
    assert after["token_ids"] == before["token_ids"]


def test_refusals_come_before_any_work(invoke: Invoke, target: Path, tmp_path: Path) -> None:
    occupied = tmp_path / "occupied"
    occupied.mkdir()
    (occupied / "thesis.txt").write_text("mine")
    other = tmp_path / "other-drafter"
    narrow = tmp_path / "narrow"
    write_target(narrow, "llama", hidden_size=32)
    write_random_drafter(narrow, other, num_layers=1, block_size=4)
    for arguments, words in [
        (("--target", target, "--out", occupied), [str(occupied), "--out"]),
        (("--target", tmp_path / "missing", "--out", tmp_path / "x"), ["missing"]),
        (("--target", target, "--out", tmp_path / "x", "--max-context", 100_000), ["100000", "512"]),
        (("--target", target, "--drafter", other, "--out", tmp_path / "x"), ["64", "32"]),
    ]:
        done = invoke("build", *arguments)
        assert done.exit_code == 1, done.stderr
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert done.stderr.startswith("Error: ")
        assert all(word in done.stderr for word in words), done.stderr
    assert (occupied / "thesis.txt").read_text() == "mine"
    assert not (tmp_path / "x").exists()


def test_engines_of_a_gpu_come_with_the_build(invoke: Invoke, target: Path, tmp_path: Path) -> None:
    common = ("--target", target, "--max-context", 64)
    built = invoke("build", *common, "--out", tmp_path / "c", "--precision", "bf16", "--backend", "ort-cuda")
    assert built.exit_code == 0, built.stderr
    record = json.loads((tmp_path / "c" / "engines" / "ort-cuda" / "engine.json").read_text(encoding="utf-8"))
    assert record["execution_precision"] == "bf16"
    refused = invoke("build", *common, "--out", tmp_path / "x", "--precision", "fp32", "--backend", "ort-cuda")
    assert refused.exit_code == 1 and "--precision bf16" in refused.stderr
    for option in (("--fp32-residuals",), ("--max-build-memory", "2GB"), ("--compute-capability", "8.9")):
        assert invoke("build", *common, "--out", tmp_path / "x", *option).exit_code == 2
    assert not (tmp_path / "x").exists()


def test_build_takes_the_options_of_engines(invoke: Invoke, target: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    done = invoke(
        "build", "--target", target, "--out", tmp_path / "b", "--max-context", 64, "--precision", "bf16", "--backend",
        "tensorrt-rtx", "--compute-capability", "8.9", "--prefill-chunk", 16, "--fp32-residuals", "--weights", "shared",
        "--max-build-memory", "4GB", "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    record = json.loads((tmp_path / "b" / "engines" / "tensorrt-rtx-sm89" / "engine.json").read_text(encoding="utf-8"))
    assert record["prefill_chunk_tokens"] == 16 and record["weights_mode"] == "shared"


def test_a_random_drafter_has_the_public_format(target: Path, tmp_path: Path) -> None:
    public, ours = tmp_path / "public", tmp_path / "ours"
    config = AutoConfig.from_pretrained(target)
    write_drafter(public, config, layers=2, taps=(0, 1), head_dim=16)
    write_random_drafter(target, ours, num_layers=2)
    expected, found = load_file(public / "model.safetensors"), load_file(ours / "model.safetensors")
    assert {name: t.shape for name, t in found.items()} == {name: t.shape for name, t in expected.items()}

"""The plan from config files against real bundles: files, caches of a session, and the two ways to read sizes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from pairs import AUTHOR_PAIRS, HALF_PAIRS, MAIN, Pair
from recorded_engines import BACKENDS, write_recorded_engines
from tiny_models import edit_json

from dflash_engines.tensorrt_versions import cache_layouts
from dflash_runtime.bundle import Bundle
from dflash_tools import plan_against_measured, plan_formulas
from dflash_tools.bundle_shape import drafter_shape_of_bundle, model_shape_of_bundle
from dflash_tools.device_conditions import DeviceConditions
from dflash_tools.device_table import find_device
from dflash_tools.plan_against_measured import main, plan_shapes, stored_as
from dflash_tools.plan_times_against_measured import main as times_command
from dflash_tools.speed_profile import CycleCost, ProfilePrompts, SpeedProfile, write_profile
from dflash_tools.weight_bytes import model_bytes

Make = Callable[[Pair], Path]
(UNTIED,) = (pair for pair in AUTHOR_PAIRS if pair.name == "qwen2-untied-block-2")


def compare(bundle: Path, *arguments: object) -> Result:
    argv = [str(bundle), "--threads", "1", *map(str, arguments)]
    return CliRunner().invoke(main, argv, catch_exceptions=False)


@pytest.mark.parametrize(
    "pair", [pytest.param(MAIN, id="main"), pytest.param(HALF_PAIRS[0], id="bf16", marks=pytest.mark.slow)]
)
def test_weights_and_caches_are_as_planned(exported: Make, pair: Pair) -> None:
    done = compare(exported(pair), "--json")
    assert done.exit_code == 0, done.output
    items = {item["name"]: item for item in json.loads(done.stdout)["items"]}
    assert set(items) == {"target weight files", "target KV cache", "drafter weight files", "drafter KV cache",
                          "engine files", "session: weights and KV"}  # fmt: skip
    for role in ("target", "drafter"):
        assert items[f"{role} KV cache"]["difference"] == 0
        assert 0 <= items[f"{role} weight files"]["difference"] < 0.03  # the file's header
        assert items[f"{role} weight files"]["judged"] and items[f"{role} KV cache"]["judged"]
    assert items["engine files"]["real_bytes"] > 0


def test_a_plan_that_forgets_the_prefill_chunk_fails(exported: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_formulas, "capacity_tokens", lambda context, blocks, *chunk: context + max(blocks))
    done = compare(exported(MAIN))
    assert done.exit_code == 1
    assert "target KV cache" in done.stdout
    assert "FAILED: over 3%" in done.stdout


def test_a_plan_that_forgets_the_fusing_matrix_fails(exported: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    forgetful = lambda drafter, storage: model_bytes(drafter.body, storage)  # noqa: E731
    monkeypatch.setattr(plan_against_measured, "drafter_bytes", forgetful)
    done = compare(exported(MAIN))
    assert done.exit_code == 1
    (line,) = [line for line in done.stdout.splitlines() if "FAILED" in line]
    assert line.startswith("drafter weight files")


@pytest.mark.parametrize("forgotten", [False, True])
def test_weights_caches_and_engines_of_a_gpu(
    exported: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: bool
) -> None:
    bundle = Path(shutil.copytree(exported(MAIN), tmp_path / "bundle"))
    opened = Bundle.open(bundle)
    folder = write_recorded_engines(opened, "fused", opened.manifest.block_sizes, 32)
    items = {item["name"]: item for item in json.loads(compare(bundle, "--engines", folder, "--json").stdout)["items"]}
    assert set(items) == {"weights given to engines", "KV caches", "engine files, what they hold included", "sum"}
    assert items["KV caches"]["difference"] == items["weights given to engines"]["difference"] == 0
    # Engines of toys are small for their layers: at their own size all fits, and a cache that is forgotten shows.
    engines = items["engine files, what they hold included"]
    monkeypatch.setattr(plan_formulas, "engine_bytes", lambda *sizes: engines["real_bytes"])
    if forgotten:
        monkeypatch.setattr(plan_formulas, "kv_bytes", lambda shape, capacity, item: 1)
    done = compare(bundle, "--engines", folder)
    assert done.exit_code == (1 if forgotten else 0), done.stdout
    assert ("sum" in done.stdout.splitlines()[-1]) and (("FAILED" in done.stdout) == forgotten)


@pytest.mark.parametrize("pair", [MAIN, UNTIED], ids=lambda pair: pair.name)
def test_config_and_manifest_give_the_same_sizes(exported: Make, pair: Pair) -> None:
    bundle = Bundle.open(exported(pair))
    by_config, drafter = plan_shapes(bundle)
    by_manifest = model_shape_of_bundle(bundle)
    assert by_config.num_parameters == by_manifest.num_parameters == bundle.manifest.target.num_parameters
    for field in ("num_heads", "head_dim", "num_kv_heads", "embedding_elements", "head_elements", "vector_elements"):
        assert getattr(by_config, field) == getattr(by_manifest, field), field
    assert by_config.kv_layers == by_manifest.kv_layers
    assert drafter is not None
    assert bundle.manifest.drafter is not None
    listed = drafter_shape_of_bundle(bundle, by_manifest)
    assert drafter.num_parameters == listed.num_parameters == bundle.manifest.drafter.num_parameters
    assert drafter.fuse == listed.fuse
    assert (drafter.num_taps, drafter.block_size) == (listed.num_taps, listed.block_size)


def test_the_config_must_be_the_one_of_the_bundle(exported: Make, tmp_path: Path) -> None:
    bundle = exported(MAIN)
    other = tmp_path / "other"
    shutil.copytree(bundle.parent / "target", other)
    assert compare(bundle, "--target", other).exit_code == 0
    edit_json(other / "config.json", num_hidden_layers=7)
    refused = compare(bundle, "--target", other)
    assert refused.exit_code == 1
    assert "was built from" in refused.stderr and "--target" in refused.stderr
    gone = compare(bundle, "--drafter", tmp_path / "gone")
    assert gone.exit_code == 1
    assert "Give the checkpoint the bundle was built from with --drafter" in gone.stderr


def keep_profile(folder: Path, costs: list[CycleCost]) -> None:
    conditions = DeviceConditions("a board", "ARMv8", 6, "MAXN", None, 1020, None)
    prompts = ProfilePrompts("reference", "s", 3, 96, "off")
    backend = json.loads((folder / "engine.json").read_text())["backend"]
    write_profile(folder, SpeedProfile("2026-11-30", "0", backend, None, "e", conditions, 0.0, prompts, costs, []))


@pytest.mark.parametrize("form", ["fused", "primitive"])
def test_measured_times_beside_predicted_ones(exported: Make, tmp_path: Path, form: str) -> None:
    bundle = Path(shutil.copytree(exported(MAIN), tmp_path / "bundle"))
    opened, backend = Bundle.open(bundle), BACKENDS[form]
    folder = write_recorded_engines(opened, form, opened.manifest.block_sizes, 32)
    sizes = [(1, 64), (1, 128), (4, 64)]

    def told() -> list[dict[str, float]]:
        argv = [str(bundle), "--backend", backend, "--device", "orin-nx-16gb", "--json"]
        done = CliRunner().invoke(times_command, argv, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        (profile,) = json.loads(done.stdout)["profiles"]
        assert profile["conditions"]["power_mode"] == "MAXN"
        rows: list[dict[str, float]] = profile["times"]
        return rows

    argv = [str(bundle), "--backend", backend, "--device", "orin-nx-16gb"]
    assert "Run: dflash-export tune" in CliRunner().invoke(times_command, argv).stderr
    keep_profile(folder, [CycleCost(*size, 1.0, 1.0, 1.0, {}, 9) for size in sizes])
    first = told()
    assert [(row["block_size"], row["context_tokens"]) for row in first] == sizes
    assert all(row["ratio"] == pytest.approx(1 / row["predicted_ms"]) for row in first)
    shape, drafter = plan_shapes(opened)
    assert drafter is not None
    device, storage = find_device("orin-nx-16gb"), stored_as(opened.manifest, "target")
    layouts = () if form == "fused" else cache_layouts("primitive", opened.manifest.max_context_tokens + 32)
    plain = plan_formulas.verify_s(device, shape, storage, 1, 64, layouts)
    assert first[0]["predicted_ms"] == pytest.approx(1e3 * plain)
    parts = (plan_formulas.draft_s(device, shape, drafter, storage, storage, 4, 64, layouts),
             plan_formulas.verify_s(device, shape, storage, 4, 64, layouts),
             plan_formulas.append_s(device, drafter, storage, 4))  # fmt: skip
    assert first[2]["predicted_ms"] == pytest.approx(1e3 * sum(parts))
    keep_profile(folder, [CycleCost(r["block_size"], r["context_tokens"], 2 * r["predicted_ms"], 0, 0, {}, 9)
                          for r in first])  # type: ignore[arg-type] # fmt: skip
    assert [row["ratio"] for row in told()] == pytest.approx([2.0] * 3)
    table = CliRunner().invoke(times_command, argv).stdout
    assert "Jetson Orin NX 16GB, measured on a board (MAXN)" in table and table.count("2.00") >= 3

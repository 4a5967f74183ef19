"""What `plan` says of a pair against the bundle and the engines it becomes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import Make
from pairs import HALF_PAIRS

from dflash_engines import tensorrt_engines
from dflash_engines.acceptance_graph import ACCEPTANCE
from dflash_engines.candidates_graph import CANDIDATES
from dflash_engines.tensorrt_engines import BuiltEngines
from dflash_engines.tensorrt_plan import EngineOptions, EnginePlan
from dflash_engines.tensorrt_versions import row_for
from dflash_runtime.bundle import Bundle
from dflash_runtime.device_engine import BoundWeight, DeviceEngineRecord, GraphEngine
from dflash_tools import plan_against_engines
from dflash_tools.device_table import find_device
from dflash_tools.plan_against_engines import BOARDS, compare_plan, main
from dflash_tools.plan_options import settle_options
from dflash_tools.plan_sources import find_pair
from dflash_tools.resource_plan import Plan, make_plan, place_on

BLOCKS = (4, 8)


@pytest.fixture
def planned(exported: Make) -> tuple[Plan, Bundle]:
    """Half precision, as the configs of the checkpoints beside the bundle say it."""
    bundle = Bundle.open(exported(HALF_PAIRS[0]))
    pair = find_pair(str(bundle.path.parent / "target"), str(bundle.path.parent / "drafter"))
    options = settle_options(pair, "bf16", "keep", bundle.manifest.max_context_tokens, BLOCKS)
    return make_plan(pair, place_on(find_device(BOARDS[0])), options), bundle


def record_of(bundle: Bundle, folder: Path, engine_bytes: int) -> DeviceEngineRecord:
    """The record of engines that take the weights their networks take, in files of so many bytes."""
    asked = EngineOptions("tensorrt-rtx", "8.9", block_sizes=BLOCKS)
    plan = EnginePlan(bundle, asked, row_for("tensorrt-rtx", "1.7.1"), "1.7.1", "8.9")
    engines = []
    for kind in plan.kinds:
        weights = [] if kind in (ACCEPTANCE, CANDIDATES) else plan.network(kind).weight_inputs
        (folder / f"{kind}.engine").write_bytes(bytes(engine_bytes // len(plan.kinds)))
        bound = [BoundWeight(w.input, w.weight, w.dtype) for w in weights]
        engines.append(GraphEngine(kind, f"{kind}.engine", "key", plan.profiles(kind), bound, [], 0))
    return plan.record(engines, folder)


def test_the_sum_is_what_the_plan_says(
    planned: tuple[Plan, Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines of toys are not the formula's: files of the size it gives. Weights and caches are real."""
    plan, bundle = planned
    (engines,) = (item.size_bytes for item in plan.run_items if item.name == "engines")
    record = record_of(bundle, tmp_path, engines)
    *items, total = compare_plan(plan, bundle, record)
    assert [row.difference for row in items[:2]] == [0, 0] and not any(row.judged for row in items)
    assert total.judged and total.passed and total.planned_bytes == sum(row.planned_bytes for row in items)
    for item in plan_against_engines.COMPARED:  # planted faults: a plan that forgets one of them
        with monkeypatch.context() as patch:
            patch.setattr(plan_against_engines, "COMPARED", {*plan_against_engines.COMPARED} - {item})
            assert compare_plan(plan, bundle, record)[-1].planned_bytes < total.planned_bytes
    assert not compare_plan(plan, bundle, record_of(bundle, tmp_path, 2 * engines))[-1].passed


@pytest.mark.slow
def test_one_layer_of_7_b_in_int4(tmp_path: Path) -> None:
    """The true width and vocabulary: some 3 GB of disk and of memory."""
    pytest.importorskip("tensorrt_rtx")
    argv = ["--layers", "1", "--drafter-layers", "1", "--scratch", str(tmp_path), "--json"]
    done = CliRunner().invoke(main, argv, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    weights, caches, engines, total = told["items"]
    assert weights["difference"] == caches["difference"] == 0
    assert abs(engines["difference"]) < 0.01 and abs(total["difference"]) < 0.01
    assert set(told["plans"]) == set(BOARDS) and told["plans"]["orin-nx-16gb"]["fits"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("factor", "code"), [(1, 0), (2, 1)])
def test_the_command_fails_where_they_differ(
    planned: tuple[Plan, Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: int, code: int
) -> None:
    """All that it makes is given to it: checkpoints, bundle, engines, and with them the plan."""
    pytest.importorskip("tensorrt_rtx")
    plan, bundle = planned
    (engines,) = (item.size_bytes for item in plan.run_items if item.name == "engines")
    record = record_of(bundle, tmp_path, factor * engines)
    built = BuiltEngines(record, tmp_path, [], 1.0, 1, 0, 0, [])
    monkeypatch.setattr(plan_against_engines, "write_pair", lambda *given: None)
    monkeypatch.setattr(plan_against_engines, "plans_of", lambda *given: [plan])
    monkeypatch.setattr(plan_against_engines, "export_pair", lambda *given: bundle)
    monkeypatch.setattr(tensorrt_engines, "build_engines", lambda *given: built)
    done = CliRunner().invoke(main, ["--scratch", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == code, done.output
    assert ("FAILED" in done.stdout) == bool(code) and "orin-nano-8gb: " in done.stdout

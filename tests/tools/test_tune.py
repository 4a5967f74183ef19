from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from cli_calls import Invoke
from click.testing import CliRunner, Result
from recorded_machines import RecordedMachine
from tiny_bundle import Sizes, write_bundle

from dflash_runtime import EngineError, GenerationConfig
from dflash_runtime.bundle import Bundle
from dflash_tools import run_block_size
from dflash_tools.block_choice import (
    chances_by_position,
    choose_block_size,
    cycle_ms_at,
    round_ms_at,
    standard_error,
)
from dflash_tools.bundle_memory import session_memory
from dflash_tools.device_conditions import DeviceConditions, read_conditions, read_state
from dflash_tools.engine_place import find_engine_place
from dflash_tools.machine_probe import CommandResult
from dflash_tools.position_acceptance import PositionCounts
from dflash_tools.run_block_size import controller_from, pick_block_size
from dflash_tools.session_bytes import measure_session
from dflash_tools.speed_profile import (
    FILE_NAME,
    BlockAcceptance,
    CycleCost,
    ProfilePrompts,
    SpeedProfile,
    read_profiles,
    write_profile,
)
from dflash_tools.tune_command import command, profile_lines

JETSON_FILES = {
    "/etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 1, BOARD: generic, EABI: aarch64, DATE: x",
    "/proc/device-tree/model": "NVIDIA Jetson Orin Nano Developer Kit\0",
    "/proc/device-tree/compatible": "nvidia,p3768-0000+p3767-0005\0nvidia,tegra234\0",
    "/sys/class/devfreq/17000000.gpu/cur_freq": "306000000\n",
    "/sys/class/devfreq/17000000.gpu/max_freq": "1020000000\n",
    "/proc/cpuinfo": "processor : 0\nmodel name : ARMv8 Processor rev 1\n",
}


def jetson(mode: str) -> RecordedMachine:
    commands = {"nvpmodel -q": CommandResult(0, f"NV Power Mode: {mode}\n0\n", "")}
    return RecordedMachine(arch="aarch64", files=JETSON_FILES, commands=commands)


def cost(block_size: int, context: int, ms: float, spread: float = 0.0) -> CycleCost:
    return CycleCost(block_size, context, ms, ms * (1 - spread / 2), ms * (1 + spread / 2), {}, 100)


def acceptance(block_size: int, chances: list[float], rounds: int = 1000) -> BlockAcceptance:
    reached, accepted, left = [], [], float(rounds)
    for chance in chances:
        reached.append(round(left))
        left *= chance
        accepted.append(round(left))
    return BlockAcceptance(block_size, reached, accepted, [], 0.0, 0.0)


def profile(**changes: Any) -> SpeedProfile:
    base = SpeedProfile(
        made="2026-11-30T12:00:00+00:00", tool_version="0", backend="ort-cpu", threads=None, engine_sha256="e",
        conditions=read_conditions(jetson("MAXN"), uses_gpu=False), load_average=0.0,
        prompts=ProfilePrompts("reference", "s", 3, 96, "off"),
        costs=[cost(1, 64, 10), cost(1, 1064, 20), cost(4, 64, 15), cost(4, 1064, 60), cost(8, 64, 20),
               cost(8, 1064, 30)],
        acceptance=[acceptance(4, [0.8, 0.5, 0.5]), acceptance(8, [0.5] * 7)],
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def test_the_time_between_two_lengths_is_on_the_line() -> None:
    costs = [cost(1, 1064, 20), cost(1, 64, 10)]
    assert [cycle_ms_at(costs, n) for n in (1, 64, 564, 1064, 5000)] == pytest.approx([10, 10, 15, 20, 20])


def test_the_fastest_by_hand() -> None:
    # block 4: 1 + 0.8 + 0.4 + 0.2 = 2.4 tokens in 15 ms; block 8: 1 + 0.5 + ... + 0.5^7 = 1.992 in 20; plain 1 in 10
    choice = choose_block_size(profile(), 64)
    assert choice.block_size == 4
    assert [c.block_size for c in choice.candidates] == [4, 1, 8]
    assert [c.ms_per_token for c in choice.candidates] == pytest.approx([6.25, 10, 10.04], abs=0.01)
    assert "block 4 6.2 ms a token, plain 10.0 ms a token" in choice.reason
    # At 1,064 tokens: 60 / 2.4 = 25, 30 / 1.992 = 15.06, plain 20
    assert choose_block_size(profile(), 1064).block_size == 8
    assert choose_block_size(profile(), 1064, [4]).block_size == 1


def test_a_gain_inside_its_uncertainty_is_not_taken() -> None:
    costs = [cost(1, 64, 10), cost(4, 64, 22)]
    sure = profile(costs=costs, acceptance=[acceptance(4, [0.8, 0.5, 0.5], rounds=100_000)])  # 9.17 ms a token
    unsure = profile(costs=costs, acceptance=[acceptance(4, [0.8, 0.5, 0.5], rounds=20)])
    noisy = profile(costs=[cost(1, 64, 10), cost(4, 64, 22, spread=1.0)], acceptance=sure.acceptance)
    assert choose_block_size(sure, 64).block_size == 4
    for found in (unsure, noisy):
        choice = choose_block_size(found, 64)
        assert choice.block_size == 1
        assert "more than its uncertainty" in choice.reason


def test_a_drafter_never_accepted_is_not_chosen() -> None:
    found = profile(acceptance=[acceptance(4, [0, 0, 0]), BlockAcceptance(8, [0] * 7, [0] * 7, [], 1.0, 1.0)])
    assert choose_block_size(found, 64).block_size == 1


def test_standard_error_by_hand() -> None:
    # One position, accepted in half of 100 rounds: deviation 0.5, by the root of 100.
    assert standard_error(PositionCounts([100], [50])) == pytest.approx(0.05)
    # Two positions, each right half the time: counts 0, 1, 2 with chances 1/2, 1/4, 1/4; variance 11/16.
    assert standard_error(PositionCounts([64, 32], [32, 16])) == pytest.approx((11 / 16) ** 0.5 / 8)


def test_what_a_controller_starts_from() -> None:
    assert round_ms_at(profile(), 64) == {1: 10, 4: 15, 8: 20}
    assert chances_by_position(profile())[4] == pytest.approx([0.8, 0.5, 0.5])
    never = BlockAcceptance(4, [5, 0, 0], [0, 0, 0], [], 1.0, 1.0)
    assert chances_by_position(profile(acceptance=[never])) == {4: [0.0]}


def test_profiles_of_two_modes_live_side_by_side(tmp_path: Path) -> None:
    slow = profile(conditions=read_conditions(jetson("15W"), uses_gpu=False), made="later")
    write_profile(tmp_path, profile())
    write_profile(tmp_path, slow)
    assert read_profiles(tmp_path) == [profile(), slow]
    again = profile(made="again")
    write_profile(tmp_path, again)
    assert read_profiles(tmp_path) == [slow, again]
    write_profile(tmp_path, profile(engine_sha256="new engines"))
    assert [found.engine_sha256 for found in read_profiles(tmp_path)] == ["new engines"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 2, "profiles": []}',
                                  '{"schema_version": 1, "profiles": [{"made": 3}]}'])  # fmt: skip
def test_a_damaged_file_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text, encoding="utf-8")
    with pytest.raises(EngineError, match=r"speed_profiles.json cannot be read .* dflash-export tune"):
        read_profiles(tmp_path)


def test_conditions_are_those_of_the_board() -> None:
    found = read_conditions(jetson("MAXN"), uses_gpu=True)
    assert found.device == "NVIDIA Jetson Orin Nano Developer Kit"
    assert (found.power_mode, found.highest_gpu_clock_mhz) == ("MAXN", 1020)
    assert found.differences(read_conditions(jetson("15W"), uses_gpu=True)) == ["power mode was MAXN and is 15W"]
    assert found.differences(found) == []


def gpu(capability: str) -> RecordedMachine:
    query = "nvidia-smi --query-gpu=name,compute_cap,memory.total,driver_version,clocks.sm,clocks.max.sm,power.limit"
    row = f"NVIDIA GeForce RTX, {capability}, 8188, 580.1, 210, 3105, 115.00\n"
    return RecordedMachine(commands={query: CommandResult(0, row, "")})


def test_engines_of_several_gpus_are_told_apart(pair: Bundle) -> None:
    for tag, capability, mode in (
        ("sm89", "8.9", "shared"), ("sm89-embedded", "8.9", "embedded"), ("sm120", "12.0", "shared")
    ):  # fmt: skip
        folder = pair.path / "engines" / f"tensorrt-rtx-{tag}"
        folder.mkdir()
        facts = {"backend": "tensorrt-rtx", "compute_capability": capability, "weights_mode": mode,
                 "execution_precision": "bf16", "files": {"a.engine": {"size_bytes": 7, "sha256": tag}}}  # fmt: skip
        (folder / "engine.json").write_text(json.dumps(facts), encoding="utf-8")
    places = [find_engine_place(pair, "tensorrt-rtx", gpu(capability)) for capability in ("8.9", "12.0")]
    assert [place.folder.name for place in places] == ["tensorrt-rtx-sm89", "tensorrt-rtx-sm120"]
    assert (places[0].precision, places[0].file_bytes) == ("bf16", 7)
    assert places[0].record_sha256 != places[1].record_sha256
    with pytest.raises(EngineError, match="none for the GPU of this machine"):
        find_engine_place(pair, "tensorrt-rtx", gpu("7.5"))
    with pytest.raises(EngineError, match="has no engines for tensorrt"):
        find_engine_place(pair, "tensorrt", gpu("8.9"))


def test_conditions_of_a_card(pair: Bundle) -> None:
    found = read_conditions(gpu("8.9"), uses_gpu=True)
    assert (found.device, found.highest_gpu_clock_mhz, found.gpu_power_limit_watts) == ("NVIDIA GeForce RTX", 3105, 115)
    assert read_state(gpu("8.9"), uses_gpu=True).gpu_clock_mhz == 210
    assert read_conditions(gpu("8.9"), uses_gpu=False).highest_gpu_clock_mhz is None


def test_memory_by_the_facts_is_what_a_session_allocates(pair: Bundle) -> None:
    memory = session_memory(pair, "fp32", {})
    found = measure_session(pair, 1)
    assert memory.kv_bytes == found.target_kv_bytes + found.drafter_kv_bytes
    assert memory.weight_bytes == sum(entry.length_bytes for entry in pair.manifest.weights.values())
    half = session_memory(pair, "fp16", {})
    assert (half.kv_bytes * 2, half.weight_bytes * 2) == (memory.kv_bytes, memory.weight_bytes)


@pytest.fixture
def pair(tmp_path: Path) -> Bundle:
    return Bundle.open(write_bundle(tmp_path / "pair", Sizes(likely_tokens=3, max_context=400)))


def keep(pair: Bundle, **changes: Any) -> SpeedProfile:
    place = find_engine_place(pair, "ort-cpu")
    found = profile(engine_sha256=place.record_sha256, **changes)
    write_profile(place.folder, found)
    return found


def test_run_begins_with_what_the_profile_says(pair: Bundle) -> None:
    kept, sizes = keep(pair), pair.manifest.block_sizes
    picked = pick_block_size(pair, GenerationConfig(max_new_tokens=40), "ort-cpu", None, 44, jetson("MAXN"))
    assert (picked.config.block_size, picked.config.plain, picked.profile) == ("auto", False, kept)
    begun = "Block sizes are chosen round by round, beginning with block size 4 by the speed profile of "
    assert (picked.reason or "").startswith(f"{begun}2026-11-30T12:00:00+00:00: fastest;")
    assert (controller_from(kept, sizes, 64).choose(), controller_from(kept, sizes, 2020).choose()) == (4, 8)


def test_run_decodes_plainly_where_no_block_pays(pair: Bundle) -> None:
    kept = keep(pair, acceptance=[acceptance(4, [0.01] * 3), acceptance(8, [0.01] * 7)])
    assert controller_from(kept, pair.manifest.block_sizes, 64).choose() == 1


@pytest.mark.parametrize(("chance", "size"), [(0.9, 4), (0.01, None)])
def test_one_built_size_is_taken_where_it_pays(pair: Bundle, chance: float, size: int | None) -> None:
    kept = keep(pair, acceptance=[acceptance(4, [chance] * 3)])
    alone = Bundle(pair.path, dataclasses.replace(pair.manifest, block_sizes=[4]))
    picked = pick_block_size(alone, GenerationConfig(), "ort-cpu", None, 10, jetson("MAXN"))
    assert (picked.config.block_size, picked.config.plain, picked.profile) == (size, size is None, kept)
    name = "Plain decoding" if size is None else "Block size 4"
    assert (picked.reason or "").startswith(f"{name} by the speed profile of ")


@pytest.mark.parametrize(
    ("changes", "threads", "machine", "words"),
    [
        ({}, None, jetson("15W"), "power mode was MAXN and is 15W"),
        ({}, 4, jetson("MAXN"), "threads were not given and are 4"),
        ({"backend": "tensorrt"}, None, jetson("MAXN"), "its backend was tensorrt and is ort-cpu"),
    ],
)
def test_a_profile_of_another_state_is_not_used(
    pair: Bundle, changes: dict[str, Any], threads: int | None, machine: RecordedMachine, words: str
) -> None:
    keep(pair, **changes)
    config = GenerationConfig()
    picked = pick_block_size(pair, config, "ort-cpu", threads, 10, machine)
    assert picked.config == dataclasses.replace(config, block_size="auto")
    assert picked.profile is None
    assert picked.reason is not None
    assert words in picked.reason
    assert "Run: dflash-export tune" in picked.reason


def test_a_profile_of_other_engines_is_not_used(pair: Bundle) -> None:
    write_profile(find_engine_place(pair, "ort-cpu").folder, profile(engine_sha256="of another build"))
    picked = pick_block_size(pair, GenerationConfig(), "ort-cpu", None, 10, jetson("MAXN"))
    assert "made with other engines" in (picked.reason or "")


@pytest.mark.parametrize("config", [GenerationConfig(block_size=8), GenerationConfig(plain=True)])
def test_what_is_asked_for_stays(pair: Bundle, config: GenerationConfig) -> None:
    keep(pair)
    assert pick_block_size(pair, config, "ort-cpu", None, 10, jetson("MAXN")).config is config


def tune(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(a) for a in arguments], catch_exceptions=False)


def test_a_profile_measured_beside_other_work_says_so() -> None:
    busy = profile(load_average=9.0 * profile().conditions.num_cpus)
    assert any(line.startswith("note: Other work ran on this machine") for line in profile_lines(busy))
    assert not any(line.startswith("note:") for line in profile_lines(profile()))


def test_tune_then_run(pair: Bundle, invoke: Invoke) -> None:
    done = tune(pair.path, "--num-prompts", 2, "--max-new-tokens", 12, "--rounds", 1, "--context", 20, "--context", 90)
    assert done.exit_code == 0, done.stderr
    (found,) = read_profiles(pair.path / "engines" / "ort-cpu")
    assert [(c.block_size, c.context_tokens) for c in found.costs] == [(b, n) for b in (1, 4, 8) for n in (20, 90)]
    # 24 new tokens, one a round by script: the rounds that the end would cut are not counted.
    assert [c.cycles for c in found.costs] == [23, 23, 21, 21, 17, 17]
    assert [len(a.reached) for a in found.acceptance] == [3, 7]
    assert found.conditions == read_conditions(run_block_size.Machine(), uses_gpu=False)
    assert isinstance(found.conditions, DeviceConditions)
    assert "best at 20 tokens" in done.stdout
    answered = json.loads(invoke("run", pair.path, "hello", "--json", "--max-new-tokens", 8).stdout)
    assert "by the speed profile of" in answered["block_size_reason"]
    chosen = choose_block_size(found, 5 + 4).block_size
    name = "plain decoding" if chosen == 1 else f"block size {chosen}"
    assert f"beginning with {name} by" in answered["block_size_reason"]
    with_size = json.loads(invoke("run", pair.path, "hello", "--json", "--block-size", 8).stdout)
    assert with_size["block_size"] == 8
    assert "block_size_reason" not in with_size

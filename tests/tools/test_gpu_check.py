"""The GPU check where there is no GPU: it ends well, says why nothing ran, and one stage's fate is its own."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from dflash_runtime.errors import OutputError, ParityError
from dflash_tools import gpu_check, gpu_check_small, gpu_check_speed
from dflash_tools.gpu_check_pieces import (
    JOIN_LIMIT_S,
    PIECE_BYTES,
    TINY_DRAFTER,
    TINY_TARGET,
    TRIP_BYTES,
    join_packages,
    pieces,
    split_packages,
)
from dflash_tools.gpu_check_stage import DONE, FAILED, SKIPPED, Outcome, Skipped, Stage, answer_for, run_stages, table

ROOT = Path(__file__).parents[2]
LAST_ARGUMENT = "import json, sys\nout = open(sys.argv[-1], 'w')\n"


def stage(name: str, code: str, budget_s: float = 30.0) -> Stage:
    return Stage(name, budget_s, (sys.executable, "-c", LAST_ARGUMENT + code))


def run(stages: Sequence[Stage], limit_s: float = 60.0) -> dict[str, Outcome]:
    return {outcome.name: outcome for outcome in run_stages(stages, limit_s, lambda outcomes: None, dict(os.environ))}


def test_without_a_gpu_every_gpu_stage_is_skipped_and_says_why(tmp_path: Path) -> None:
    nothing = tmp_path / "bin"
    nothing.mkdir()  # a folder of programs without nvidia-smi
    for program in ("bash", "dirname"):
        (nothing / program).symlink_to(f"/bin/{program}" if Path(f"/bin/{program}").exists() else f"/usr/bin/{program}")
    given = {**os.environ, "PATH": str(nothing), "PYTHON": sys.executable, "OUT": str(tmp_path / "out")}
    command = [str(ROOT / "tools" / "gpu_check"), "--pieces", str(tmp_path)]
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "out" / "gpu_check.json").read_text(encoding="utf-8"))
    assert [row["name"] for row in told["stages"]] == list(gpu_check.STAGES)
    for row in told["stages"]:
        if row["name"] == "machine":
            assert row["status"] == DONE
            assert row["data"]["facts"]["gpus"] == []
        else:
            assert (row["status"], row["data"]) == (SKIPPED, {})
            assert "no NVIDIA GPU here" in row["reason"]
    assert "nothing was taken along" in told["packages_taken_along"]
    assert done.stdout.count("skipped") == 2 * (len(gpu_check.STAGES) - 1)


def test_a_stage_that_fails_in_any_way_leaves_the_others_alone() -> None:
    answer = "json.dump({'status': 'done', 'reason': '', 'data': {'n': 1}}, out); out.close()\n"
    found = run([
        stage("raises", "raise RuntimeError('planted')"),
        stage("crashes", "import os; os.kill(os.getpid(), 11)"),
        stage("hangs", "import time; time.sleep(60)", budget_s=1.0),
        stage("babbles", "out.write('no json')"),
        stage("claims", answer + "sys.exit(3)"),
        stage("invents", "json.dump({'status': 'fine', 'reason': '', 'data': {}}, out)"),
        stage("works", answer),
    ])  # fmt: skip
    assert {name: outcome.status for name, outcome in found.items()} == {
        **dict.fromkeys(("raises", "crashes", "hangs", "babbles", "claims", "invents"), FAILED), "works": DONE,
    }  # fmt: skip
    assert "planted" in found["raises"].data["log"][-1]
    assert "exit code -11" in found["crashes"].reason
    assert "budget of 1 s" in found["hangs"].reason
    assert "exit code 3" in found["claims"].reason
    assert found["works"].data == {"n": 1}
    assert len(table(list(found.values()))) == 7


def test_no_stage_begins_after_the_limit() -> None:
    found = run([stage("late", "raise SystemExit(1)")], limit_s=1.0)
    assert found["late"].status == SKIPPED
    assert "limit of 1 s" in found["late"].reason


def test_what_a_stage_measured_before_it_failed_is_kept() -> None:
    def work(data: dict[str, object]) -> None:
        data["measured"] = 3
        raise ParityError("planted")

    def skips(data: dict[str, object]) -> None:
        raise Skipped("nothing here")

    told = answer_for(work)
    assert told == {"status": FAILED, "reason": "ParityError: planted", "data": {"measured": 3}}
    assert answer_for(skips)["status"] == SKIPPED


def test_a_stage_whose_module_breaks_is_a_failed_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_check.STAGES, "planted", ("gpu_check_nowhere", "stage", 1.0))
    gpu_check.execute("planted", str(tmp_path / "answer"))
    assert "gpu_check_nowhere" in json.loads((tmp_path / "answer").read_text(encoding="utf-8"))["reason"]


def test_every_stage_is_a_function_with_a_budget_within_the_limit() -> None:
    modules = {"gpu_check_small": gpu_check_small, "gpu_check_speed": gpu_check_speed}
    for module, function, budget_s in gpu_check.STAGES.values():
        assert callable(getattr(modules[module], function))
        assert 0 < budget_s < gpu_check.LIMIT_S
    assert gpu_check.LIMIT_S + JOIN_LIMIT_S <= 8 * 60


def test_a_checkout_that_is_not_installed_states_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stated = importlib.metadata.version("dflash-export")
    assert gpu_check.state_version(tmp_path) is None

    def unknown(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", unknown)
    folder = gpu_check.state_version(tmp_path)
    (found,) = importlib.metadata.distributions(path=[str(folder)])
    assert (found.metadata["Name"], found.metadata["Version"]) == ("dflash-export", stated)


class Says:
    """A backend whose words depend on the block size where it is told so."""

    def __init__(self, wrong: bool) -> None:
        self.prefill_chunk_tokens, self.wrong = 64, wrong

    def reset(self, kept_rows: int = 0) -> int:
        return kept_rows

    def prefill(self, ids: Sequence[int], position: int) -> int:
        return 1

    def draft(self, anchor: int, block_size: int, position: int) -> list[int]:
        return [1] * (block_size - 1)

    def verify(self, block: Sequence[int], position: int) -> list[int]:
        return [2 if self.wrong and len(block) > 1 else 1] * len(block)

    def append_context(self, rows: int, position: int) -> None:
        pass

    def close(self) -> None:
        pass


def test_words_that_differ_fail_the_stage(bundle: Path) -> None:
    from dflash_runtime.bundle import Bundle

    opened = Bundle.open(bundle)
    data: dict[str, object] = {}
    gpu_check_small.compare_words(data, Says(wrong=False), opened, bundle / "none")  # type: ignore[arg-type]
    assert data["different"] == [] and data["accepted_drafts"]
    with pytest.raises(ParityError, match="other words with DFlash than plain"):
        gpu_check_small.compare_words({}, Says(wrong=True), opened, bundle / "none")  # type: ignore[arg-type]


class Notes(Says):
    """Keeps what it is asked for."""

    def __init__(self) -> None:
        super().__init__(wrong=False)
        self.drafted: list[tuple[int, int]] = []
        self.verified: list[tuple[int, int]] = []

    def draft(self, anchor: int, block_size: int, position: int) -> list[int]:
        self.drafted.append((block_size, position))
        return super().draft(anchor, block_size, position)

    def verify(self, block: Sequence[int], position: int) -> list[int]:
        self.verified.append((len(block), position))
        return super().verify(block, position)


def test_cycles_draft_and_verify_and_commit_what_the_script_says() -> None:
    backend, data = Notes(), dict[str, object]()
    gpu_check_speed.time_pair(data, backend, 61, (4, 8), prompt_tokens=100)  # type: ignore[arg-type]
    cycles: list[dict[str, float]] = data["cycles"]  # type: ignore[assignment]
    scripts = [(cycle["block_size"], cycle["committed_per_cycle"]) for cycle in cycles]
    assert scripts == [(4, 1), (4, 2), (4, 4), (8, 1), (8, 2), (8, 4), (8, 8)]
    rounds = len(backend.drafted) // len(scripts)
    expected = [(size, 100 + n * accepted) for size, accepted in scripts for n in range(rounds)]
    assert backend.drafted == expected
    assert backend.verified[-len(expected) :] == expected


def test_the_plan_has_times_for_the_shape_that_is_measured() -> None:
    told = gpu_check_speed.roofline()
    assert 0 < told["plain_ms"] < told["cycle_4_ms"] <= told["cycle_16_ms"]


def test_what_was_measured_is_held_against_the_plan() -> None:
    cycles = [{"block_size": 4, "cycle_ms": 30.0, "device_cycle_ms": 20.0}, {"block_size": 3, "cycle_ms": 9.0},
              {"block_size": 4, "cycle_ms": 99.0, "device_cycle_ms": 99.0},
              {"block_size": 8, "cycle_ms": 12.0, "device_cycle_ms": None}]  # fmt: skip
    predicted = {"device": "h200", "plain_ms": 5.0, "cycle_4_ms": 8.0, "cycle_8_ms": 10.0}
    found = gpu_check_speed.over_prediction({"plain_ms": 6.0, "cycles": cycles}, predicted)
    assert found == {"plain": 1.2, "block 4": 2.5, "block 8": 1.2}


def test_the_pytorch_stage_measures_passes() -> None:
    import torch

    torch.set_num_threads(1)
    data: dict[str, object] = {}
    target = {**TINY_TARGET, "num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8}
    drafter = {**TINY_DRAFTER, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8}
    gpu_check_speed.time_pytorch(data, torch, "cpu", target, drafter, prompt_tokens=8)
    assert float(str(data["plain_ms"])) > 0 and float(str(data["rows_16_ms"])) > 0
    assert dict(data["authors"])["status"] in ("done", "skipped")  # type: ignore[call-overload]


def wheel(folder: Path) -> Path:
    path = folder / "planted_package-1.0-py3-none-any.whl"
    info = "planted_package-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("planted_package.py", f"PADDING = {'x' * 3000!r}\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: planted-package\nVersion: 1.0\n")
        kind = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", kind)
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_packages_are_cut_joined_and_installed(tmp_path: Path) -> None:
    folder = tmp_path / "pieces"
    folder.mkdir()
    split_packages([wheel(tmp_path)], folder, piece_bytes=1000)
    parts = [piece for piece in pieces(folder) if piece.name.startswith("packages.0")]
    assert len(parts) > 2
    assert all(sum(p.stat().st_size for p in part.iterdir()) <= 1000 for part in parts)
    site, words = join_packages(folder)
    assert site is not None and (site / "planted_package.py").is_file(), words
    assert join_packages(folder) == (site, "installed before")
    assert not list(folder.glob("*.whl"))


def test_a_trip_is_small_enough() -> None:
    """The checkout as it travels, what ships with it included, and beside it a piece and bundles without weights."""
    argv = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(argv, capture_output=True, check=False)
    if listed.returncode != 0:
        pytest.skip("this is no checkout")
    paths = [ROOT / os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]
    checkout = sum(path.stat().st_size for path in paths if path.is_file())
    assert checkout > 1_000_000
    assert checkout + PIECE_BYTES + 4_000_000 < TRIP_BYTES, f"the checkout has {checkout:,} bytes"


def test_a_missing_or_altered_piece_is_named(tmp_path: Path) -> None:
    assert join_packages(tmp_path)[0] is None
    split_packages([wheel(tmp_path)], tmp_path, piece_bytes=1000)
    part = next((tmp_path / "packages.01").iterdir())
    data = part.read_bytes()
    part.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(OutputError, match="sha256"):
        join_packages(tmp_path)
    part.unlink()
    site, words = join_packages(tmp_path)
    assert site is None
    assert "packages.01" in words

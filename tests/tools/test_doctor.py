"""`dflash-export doctor` on recorded machines, and on this one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from cli_calls import Launch
from click.testing import CliRunner, Result
from recorded_machines import (
    RecordedMachine,
    bare_cpu,
    gpus,
    installed,
    orin_nano,
    orin_nano_mended,
    server,
    thor_7_0,
    thor_7_2,
    workstation,
)

from dflash_runtime import backend
from dflash_tools.cli import main
from dflash_tools.doctor_backends import NEEDS
from dflash_tools.doctor_traps import find_traps
from dflash_tools.machine_probe import CommandResult, Machine


@pytest.fixture(autouse=True)
def _every_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts are about the machine; which backends this version has is tested apart."""
    monkeypatch.setattr(backend, "AVAILABLE", tuple(NEEDS))


def call(machine: Machine, *options: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *options], obj=machine, catch_exceptions=False)


def told(machine: Machine) -> dict[str, Any]:
    result = call(machine, "--json")
    answer: dict[str, Any] = json.loads(result.stdout)
    assert result.exit_code == (0 if answer["ready"] else 1)
    return answer


def trap_names(answer: Mapping[str, Any]) -> list[str]:
    return sorted(trap["name"] for trap in answer["traps"])


def lacks_of(answer: Mapping[str, Any], name: str) -> list[tuple[str, str]]:
    report = next(item for item in answer["backends"] if item["name"] == name)
    assert report["can_run"] is (not report["lacks"])
    return [(lack["what"], lack["do"]) for lack in report["lacks"]]


def test_a_machine_with_nothing_is_told_what_to_type() -> None:
    result = call(bare_cpu())
    assert result.exit_code == 1
    assert result.stderr == ""
    for line in (
        "system       Debian GNU/Linux 12 (bookworm), x86_64",
        "python       3.11.2, no virtual environment",
        "gpu          none found",
        "cuda         no driver, no runtime, no cuda-bindings, no cuDNN",
        "tensorrt     not installed",
        "onnxruntime  not installed",
        "torch        not installed (needed to export, not to run)",
        "memory       14.3 GB of 16.4 GB available, no swap",
        "none found",
        "-> pip install 'dflash-export[ort]'",
        "No backend can run here yet.",
    ):
        assert f"  {line}\n" in result.stdout or f"{line}\n" in result.stdout, line
    answer = told(bare_cpu())
    assert answer["traps"] == []
    assert lacks_of(answer, "ort-cpu") == [("onnxruntime is not installed", "pip install 'dflash-export[ort]'")]
    assert [what for what, _ in lacks_of(answer, "tensorrt-rtx")] == [
        "no NVIDIA GPU was found (nvidia-smi is not here)",
        "TensorRT-RTX is not installed",
        "cuda-bindings is not installed",
        "onnx-ir and ml-dtypes not installed",
    ]


def test_a_machine_with_onnxruntime_alone_is_ready() -> None:
    machine = bare_cpu()
    installed(machine, "onnxruntime", "1.32.0", "onnxruntime")
    assert told(machine)["ready"] == ["ort-cpu"]
    assert "Ready here: ort-cpu.\n" in call(machine).stdout


def test_workstation_runs_tensorrt_rtx() -> None:
    answer = told(workstation())
    assert answer["ready"] == ["ort-cpu", "tensorrt-rtx"]
    assert answer["traps"] == []
    gpu = answer["facts"]["gpus"][0]
    assert gpu["compute_capability"] == [8, 9]
    assert gpu["memory_bytes"] == 24564 * 1024 * 1024
    assert (gpu["driver"], gpu["clock_mhz"], gpu["highest_clock_mhz"]) == ("580.95.05", 210, 3105)
    assert answer["facts"]["cuda"]["driver"] == [13, 0]
    assert lacks_of(answer, "tensorrt") == [("TensorRT is not installed", "pip install 'tensorrt-cu13>=10.15'")]
    text = call(workstation()).stdout
    assert "RTX 4090, compute capability 8.9 (SM 89), 25.8 GB, driver 580.95.05, 210 of 3105 MHz, up to 450 W" in text
    assert "tensorrt     TensorRT-RTX 1.7.1.116 (pip)\n" in text


def test_server_is_told_that_rtx_has_no_hopper_kernels() -> None:
    answer = told(server())
    assert trap_names(answer) == ["cuda-bindings", "no-kernels", "tensorrt-cuda", "torch-cuda", "two-onnxruntimes"]
    by_name = {trap["name"]: trap for trap in answer["traps"]}
    assert "no kernels for compute capability 9.0" in by_name["no-kernels"]["what"]
    assert "This GPU is NVIDIA H200." in by_name["no-kernels"]["what"]
    assert by_name["no-kernels"]["do"] == "Use the backend tensorrt."
    assert by_name["cuda-bindings"]["do"] == "pip install 'cuda-bindings==12.*'"
    assert "built for CUDA 13.0, the driver runs CUDA up to 12.8" in by_name["torch-cuda"]["what"]
    assert "pip uninstall -y onnxruntime onnxruntime-gpu" in by_name["two-onnxruntimes"]["do"]
    assert ("TensorRT is not installed", "pip install 'tensorrt-cu12>=10.15'") in lacks_of(answer, "tensorrt")
    assert answer["facts"]["onnxruntime"]["providers"] == ["cpu", "cuda", "tensorrt"]
    assert lacks_of(answer, "ort-cuda") == [
        ("the trap cuda-bindings is in the way", "pip install 'cuda-bindings==12.*'"),
        ("cuDNN was not found", "pip install 'onnxruntime-gpu[cuda,cudnn]>=1.30'"),
    ]


def test_orin_nano_with_every_trap() -> None:
    answer = told(orin_nano())
    assert answer["ready"] == []
    jetson = answer["facts"]["jetson"]
    assert (jetson["l4t"], jetson["jetpack"], jetson["power_mode"]) == ("36.4.3", "6.2.1", "MAXN_SUPER")
    assert (jetson["gpu_clock_mhz"], jetson["gpu_highest_clock_mhz"]) == (306, 1020)
    assert answer["facts"]["gpus"][0]["compute_capability"] == [8, 7]
    assert answer["facts"]["gpus"][0]["memory_bytes"] is None
    assert answer["facts"]["cuda"]["runtime"] == [12, 6]
    assert answer["facts"]["memory"]["disk_swap_bytes"] == 0
    assert trap_names(answer) == [
        "cuda-bindings",
        "isolated-environment",
        "memory",
        "nvdla-compiler",
        "python-3.10",
    ]
    by_name = {trap["name"]: trap for trap in answer["traps"]}
    assert by_name["nvdla-compiler"]["do"].startswith("sudo apt-get install nvidia-l4t-dla-compiler && sudo ldconfig")
    assert by_name["isolated-environment"]["do"].startswith("python3 -m venv --system-site-packages ~/dflash")
    assert "1.23.2: it has no TensorScatter" in by_name["python-3.10"]["what"]
    assert "swapon /swapfile" in by_name["memory"]["do"]
    assert by_name["cuda-bindings"]["do"] == "pip install 'cuda-bindings==12.*'"
    assert lacks_of(answer, "tensorrt-rtx")[-1][1] == "Use the backend tensorrt."
    text = call(orin_nano()).stdout
    assert "Developer Kit Super, JetPack 6.2.1, Jetson Linux 36.4.3\n" in text
    assert "power        mode MAXN_SUPER, GPU clock 306 of 1020 MHz\n" in text
    assert "TensorRT 10.3.0.30-1+cuda12.5 (apt, no module for this Python)" in text


def test_orin_nano_after_the_advice_was_followed() -> None:
    answer = told(orin_nano_mended())
    assert answer["ready"] == ["tensorrt"]
    assert trap_names(answer) == ["python-3.10"]
    assert [(item["version"], item["source"]) for item in answer["facts"]["tensorrt"]] == [
        ("10.3.0.30-1+cuda12.5", "apt")
    ]


@pytest.mark.parametrize(
    ("make", "jetpack", "cuda", "tensorrt"),
    [
        (thor_7_0, "7.0/7.1", [13, 0], "10.13.3.9-1+cuda13.0"),
        (thor_7_2, "7.2", [13, 2], "10.16.2.10-1+cuda13.2"),
    ],
)
def test_thor(make: Callable[[], RecordedMachine], jetpack: str, cuda: list[int], tensorrt: str) -> None:
    answer = told(make())
    assert answer["ready"] == ["ort-cpu", "tensorrt"]
    assert answer["traps"] == []
    assert answer["facts"]["jetson"]["jetpack"] == jetpack
    assert answer["facts"]["jetson"]["gpu_clock_mhz"] == 1575
    assert answer["facts"]["cuda"]["driver"] == cuda
    assert [item["version"] for item in answer["facts"]["tensorrt"]] == [tensorrt]
    assert answer["facts"]["gpus"][0]["compute_capability"] == [11, 0]
    assert "11.0" in lacks_of(answer, "tensorrt-rtx")[0][0]
    assert lacks_of(answer, "ort-cuda") == [
        ("PyPI has no onnxruntime-gpu for aarch64", "Use the backend tensorrt."),
    ]


def test_a_jetson_without_nvidia_smi_is_known_by_its_chip() -> None:
    machine = orin_nano_mended()
    machine.commands = {name: done for name, done in machine.commands.items() if not name.startswith("nvidia-smi")}
    answer = told(machine)
    assert answer["facts"]["gpus"][0]["compute_capability"] == [8, 7]
    assert answer["ready"] == ["tensorrt"]


def test_another_python_than_that_of_jetpack() -> None:
    machine = orin_nano_mended()
    machine.python = "3.12.3"
    del machine.modules["tensorrt"]
    trap = next(trap for trap in told(machine)["traps"] if trap["name"] == "python-version")
    assert trap["what"] == "The TensorRT module of JetPack 6.1/6.2 is for Python 3.10; this is Python 3.12.3."
    assert trap["do"].startswith("/usr/bin/python3.10 -m venv --system-site-packages")


def test_a_jetpack_that_no_graph_was_written_for() -> None:
    machine = orin_nano_mended()
    machine.files["/etc/nv_tegra_release"] = "# R36 (release), REVISION: 3.0, GCID: 36923193, BOARD: generic\n"
    assert "jetpack-release" in trap_names(told(machine))


def test_a_tensorrt_that_is_too_old_is_told_by_the_table() -> None:
    machine = workstation()
    installed(machine, "tensorrt", "10.0.1", "tensorrt")
    what, do = lacks_of(told(machine), "tensorrt")[0]
    assert what.startswith("TensorRT 10.0.1 is too old: graphs are written for 10.3 and newer.")
    assert do == "pip install 'tensorrt-cu13>=10.15'"


def test_a_tensorrt_without_kernels_for_a_younger_gpu() -> None:
    machine = workstation()
    gpus(machine, "NVIDIA GeForce RTX 5090, 12.0, 32607, 580.95.05, 210, 3090, 575.00\n")
    installed(machine, "tensorrt", "10.3.0", "tensorrt")
    trap = next(trap for trap in told(machine)["traps"] if trap["name"] == "no-kernels")
    assert "10.8 is the first with them" in trap["what"]


def test_an_old_onnxruntime() -> None:
    machine = bare_cpu()
    installed(machine, "onnxruntime", "1.22.0", "onnxruntime")
    assert lacks_of(told(machine), "ort-cpu") == [
        ("onnxruntime 1.22.0 is too old: 1.24 is needed", "pip install -U 'dflash-export[ort]'")
    ]


def test_a_driver_that_does_not_answer_is_quoted() -> None:
    machine = workstation()
    said = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    machine.commands = {"nvidia-smi": CommandResult(9, said, "")}
    answer = told(machine)
    assert answer["facts"]["gpu_error"] == said
    assert said in lacks_of(answer, "tensorrt-rtx")[0][0]
    assert answer["ready"] == ["ort-cpu"]


def test_a_driver_that_knows_no_compute_capability() -> None:
    machine = workstation()
    machine.commands = {
        "nvidia-smi": CommandResult(2, 'Field "compute_cap" is not a valid field to query.\n', ""),
        "nvidia-smi --query-gpu=name,memory.total,driver_version": CommandResult(0, "Tesla T4, 15109, 450.80.02\n", ""),
    }
    assert lacks_of(told(machine), "tensorrt-rtx") == [
        ("the driver does not state the compute capability of Tesla T4", "Update the driver: 510 or newer")
    ]


def test_little_memory_on_a_gpu_machine() -> None:
    machine = workstation()
    machine.files["/proc/meminfo"] = "MemTotal: 4000000 kB\nMemAvailable: 2000000 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n"
    assert trap_names(told(machine)) == ["memory"]


def test_a_backend_this_version_does_not_have_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "AVAILABLE", ("ort-cpu",))
    answer = told(workstation())
    assert answer["ready"] == ["ort-cpu"]
    assert lacks_of(answer, "tensorrt-rtx")[0][0] == "this version of dflash-export does not have it"


def test_another_system_than_linux() -> None:
    machine = RecordedMachine(system="Darwin", arch="arm64", virtual=False)
    result = call(machine)
    assert result.exit_code == 1
    assert "system       Darwin, arm64\n" in result.stdout
    assert "memory       unknown (no /proc/meminfo)\n" in result.stdout


def test_this_machine(launch: Launch) -> None:
    done = launch("doctor", "--json")
    answer = json.loads(done.stdout)
    assert done.stderr == ""
    assert done.returncode == (0 if answer["ready"] else 1)
    assert answer["facts"]["python"]["version"] == ".".join(map(str, sys.version_info[:3]))
    assert answer["facts"]["free_disk_bytes"] > 0
    assert "ort-cpu" in answer["ready"]  # the tests need ONNX Runtime


def test_traps_that_block_come_first() -> None:
    from dflash_tools.doctor_reading import read_facts

    blocking = [bool(trap.blocks) for trap in find_traps(read_facts(server()))]
    assert blocking == sorted(blocking, reverse=True)
    assert True in blocking
    assert False in blocking


def test_help_states_the_exit_codes(launch: Launch) -> None:
    done = launch("doctor", "--help")
    assert done.returncode == 0
    assert "Exit code 0: at least one backend can run here." in done.stdout
    assert "Exit code 1: none can." in done.stdout

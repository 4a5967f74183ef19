"""What `doctor` reads through: commands, libraries, and nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from dflash_tools.library_versions import library_facts
from dflash_tools.machine_probe import Machine


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys\nfrom dflash_tools.cli import main\n"
        "try:\n    main(['doctor', '--json'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'onnx', 'onnx_ir', 'onnxruntime', 'tensorrt', 'tensorrt_rtx', 'transformers'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


class FakeLibrary:
    """What ctypes would hand back."""

    def __init__(self, **functions: Callable[..., int]) -> None:
        self.__dict__.update(functions)


def test_versions_of_libraries() -> None:
    def driver_version(pointer: Any) -> int:
        pointer._obj.value = 13000
        return 0

    loaded = {
        "libcuda.so.1": FakeLibrary(cuDriverGetVersion=driver_version),
        "libcudart.so.13": FakeLibrary(cudaRuntimeGetVersion=lambda pointer: 35),
        "libnvinfer.so.10": FakeLibrary(getInferLibVersion=lambda: 101602),
        "libcudnn.so.9": FakeLibrary(),
        "libnvinfer.so.11": FakeLibrary(),
    }
    assert {name: library_facts(name, loaded.__getitem__) for name in loaded} == {
        "libcuda.so.1": {"version": 13000},
        "libcudart.so.13": {"error": "cudaRuntimeGetVersion of libcudart.so.13 failed with status 35"},
        "libnvinfer.so.10": {"version": 101602},
        "libcudnn.so.9": {"version": 0},
        "libnvinfer.so.11": {"error": "libnvinfer.so.11 has no function getInferLibVersion"},
    }


def test_a_library_that_is_not_there_is_told_in_the_loaders_words() -> None:
    assert "libnothing.so.7" in str(library_facts("libnothing.so.7")["error"])


def test_a_command_that_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_tools.machine_probe.COMMAND_TIME_LIMIT_S", 0.2)
    done = Machine().run(sys.executable, "-c", "import time; time.sleep(30)")
    assert done is not None
    assert done.exit_code == -1
    assert "gave no answer within 0.2 s" in done.stderr


def test_a_command_that_is_not_installed_is_none() -> None:
    assert Machine().run("dflash-no-such-command") is None


def test_a_library_is_asked_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "operating_system", lambda self: "Linux")
    answer = Machine().libraries(["libnothing.so.7"])
    assert "libnothing.so.7" in str(answer["libnothing.so.7"]["error"])


def test_a_library_that_takes_its_process_down_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "operating_system", lambda self: "Linux")
    monkeypatch.setattr("dflash_tools.library_versions.__file__", "/no/such/script.py")
    answer = Machine().libraries(["libnvinfer.so.10"])
    assert "did not end well (exit 2" in str(answer["libnvinfer.so.10"]["error"])

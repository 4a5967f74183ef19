"""`--device auto`: a Jetson by its device tree, a card by nvidia-smi, and machines that are neither."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_runtime.errors import DFlashError
from dflash_tools.device_table import DEVICES, devices_named
from dflash_tools.this_device import find_this_device


def machine(root: Path, total_mib: int, free_mib: int, board: str | None = None) -> Path:
    (root / "proc" / "device-tree").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(f"MemTotal: {total_mib * 1024} kB\nMemAvailable: {free_mib * 1024} kB\n")
    if board is not None:
        (root / "proc" / "device-tree" / "model").write_text(board + "\0")
    return root


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a stand-in for nvidia-smi may be put; nothing else is on the path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder / "nvidia-smi"


def answer(smi: Path, text: str, code: int = 0) -> None:
    smi.write_text(f"#!/bin/sh\necho '{text}'\nexit {code}\n")
    smi.chmod(0o755)


@pytest.mark.parametrize(
    ("board", "total_mib", "name"),
    [
        ("NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super", 7620, "orin-nano-8gb"),
        ("NVIDIA Jetson Orin NX Engineering Reference Developer Kit", 15656, "orin-nx-16gb"),
        ("NVIDIA Jetson Orin NX Engineering Reference Developer Kit", 7600, "orin-nx-8gb"),
        ("NVIDIA Jetson AGX Orin Developer Kit", 62841, "agx-orin-64gb"),
        ("NVIDIA Jetson AGX Orin Developer Kit", 30536, "agx-orin-32gb"),
        ("NVIDIA Jetson AGX Thor Developer Kit", 125772, "agx-thor-128gb"),
    ],
)
def test_a_jetson_is_known_by_board_and_memory(
    tmp_path: Path, smi: Path, board: str, total_mib: int, name: str
) -> None:
    found = find_this_device(machine(tmp_path / "root", total_mib, 5000, board))
    assert found.device.name == name
    assert found.free_bytes == 5000 << 20
    assert "MemAvailable" in found.measured_by


def test_a_card_is_asked_for_its_free_memory(tmp_path: Path, smi: Path) -> None:
    answer(smi, "NVIDIA GeForce RTX 4090, 24564, 23000")
    found = find_this_device(machine(tmp_path / "root", 64000, 60000))
    assert (found.device.name, found.free_bytes, found.measured_by) == ("rtx-4090", 23000 << 20, "nvidia-smi")


def test_a_gpu_without_memory_of_its_own_shares_the_systems(tmp_path: Path, smi: Path) -> None:
    answer(smi, "NVIDIA GB10, [N/A], [N/A]")
    found = find_this_device(machine(tmp_path / "root", 124610, 110000))
    assert (found.device.name, found.free_bytes) == ("dgx-spark", 110000 << 20)


@pytest.mark.parametrize(
    ("said", "code", "words"),
    [
        (None, 0, "no nvidia-smi on the path"),
        ("NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver", 9, "could not communicate"),
        ("NVIDIA GeForce GTX 1080, 8192, 8000", 0, "GTX 1080 with 8.6 GB, is not in the table"),
        ("NVIDIA GeForce RTX 4060 Ti, 8188, 8000", 0, "the table has it with 17.2 GB"),
        ("nonsense", 0, "'nonsense', not name, total, free"),
    ],
)
def test_what_is_not_known_is_said_with_what_to_type(
    tmp_path: Path, smi: Path, said: str | None, code: int, words: str
) -> None:
    if said is not None:
        answer(smi, said, code)
    with pytest.raises(DFlashError, match="--device orin-nx-16gb, of: orin-nano-8gb") as error:
        find_this_device(machine(tmp_path / "root", 24000, 22000))
    assert words in str(error.value)


def test_no_proc_is_no_linux(tmp_path: Path, smi: Path) -> None:
    with pytest.raises(DFlashError, match="meminfo, which cannot be read"):
        find_this_device(tmp_path / "root")


def test_every_card_is_found_by_its_drivers_name() -> None:
    for device in DEVICES.values():
        if not device.unified:
            assert device in devices_named(f"NVIDIA {device.label}")
    assert devices_named("NVIDIA GeForce RTX 4070 Ti SUPER") == []
    assert devices_named("NVIDIA GeForce RTX 4060 Ti") == [DEVICES["rtx-4060-ti-16gb"]]

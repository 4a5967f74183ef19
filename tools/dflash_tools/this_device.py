"""The device this program runs on, and the memory free on it: what `--device auto` means."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from pathlib import Path

from dflash_runtime.errors import DFlashError
from dflash_tools.device_table import DEVICES, Device, devices_named

_QUERY = ["--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
_MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class FoundDevice:
    """A row of the table, with the memory that is free now."""

    device: Device
    free_bytes: int
    measured_by: str
    """Where `free_bytes` was read."""


def find_this_device(root: Path = Path("/")) -> FoundDevice:
    """Looks for a Jetson by its device tree, then for a GPU by `nvidia-smi`.

    Args:
        root: Where the system's files lie; another folder in tests.

    Raises:
        DFlashError: no NVIDIA GPU here, or one that the table does not know.
    """
    memory = read_memory(root)
    board = root / "proc" / "device-tree" / "model"
    if board.is_file() and "jetson" in (name := board.read_text(errors="replace").strip("\0\n ")).lower():
        total = memory["MemTotal"]
        return FoundDevice(_nearest(name, total), memory["MemAvailable"], "MemAvailable in /proc/meminfo")
    name, total_mib, free_mib = _first_gpu(memory)
    if total_mib.isdigit() and free_mib.isdigit():
        return FoundDevice(_nearest(name, int(total_mib) * _MIB), int(free_mib) * _MIB, "nvidia-smi")
    # A GPU that shares the system's memory reports none of its own.
    return FoundDevice(_nearest(name, memory["MemTotal"]), memory["MemAvailable"], "MemAvailable in /proc/meminfo")


def read_memory(root: Path) -> dict[str, int]:
    """`MemTotal` and `MemAvailable` in bytes.

    Raises:
        DFlashError: not a Linux with /proc.
    """
    path = root / "proc" / "meminfo"
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise DFlashError(f"--device auto reads {path}, which cannot be read ({error}). {_type_instead()}") from error
    fields = (line.split() for line in lines)
    sizes = {f[0].rstrip(":"): int(f[1]) * 1024 for f in fields if len(f) > 1 and f[1].isdigit()}
    if missing := {"MemTotal", "MemAvailable"} - sizes.keys():
        raise DFlashError(f"{path} states no {', '.join(sorted(missing))}. {_type_instead()}")
    return sizes


def _first_gpu(memory: dict[str, int]) -> tuple[str, str, str]:
    program = shutil.which("nvidia-smi")
    free = f"({memory['MemAvailable'] / 1e9:.1f} GB of system memory are free)"
    if program is None:
        raise DFlashError(f"No NVIDIA GPU here: no Jetson, and no nvidia-smi on the path {free}. {_type_instead()}")
    done = subprocess.run([program, *_QUERY], capture_output=True, text=True, check=False, timeout=30)
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        raise DFlashError(f"nvidia-smi found no GPU {free}; it said: {said[0]}. {_type_instead()}")
    fields = [field.strip() for field in lines[0].split(",")]
    if len(fields) != 3:
        raise DFlashError(f"nvidia-smi answered {lines[0]!r}, not name, total, free. {_type_instead()}")
    return fields[0], fields[1], fields[2]


def _nearest(name: str, total_bytes: int) -> Device:
    rows = devices_named(name)
    if not rows:
        raise DFlashError(
            f"This device, {name} with {total_bytes / 1e9:.1f} GB, is not in the table. {_type_instead()}"
        )
    near = min(rows, key=lambda device: abs(device.memory_bytes - total_bytes))
    if abs(near.memory_bytes - total_bytes) > near.memory_bytes // 8:
        sizes = ", ".join(f"{device.memory_bytes / 1e9:.1f}" for device in rows)
        raise DFlashError(
            f"This device, {name}, has {total_bytes / 1e9:.1f} GB; the table has it with {sizes} GB. {_type_instead()}"
        )
    return near


def _type_instead() -> str:
    return f"Name the device meant, as in --device orin-nx-16gb, of: {', '.join(DEVICES)}."

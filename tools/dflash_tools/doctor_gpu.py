"""The GPU, and the Jetson around it."""

from __future__ import annotations

import re

from dflash_tools.doctor_facts import Gpu, Jetson
from dflash_tools.machine_probe import Machine

Answers = dict[str, dict[str, str | int]]
"""Library -> what `library_versions` said of it."""

QUERIES = (
    "name,compute_cap,memory.total,driver_version,clocks.sm,clocks.max.sm,power.limit",
    "name,compute_cap,memory.total,driver_version",
    "name,memory.total,driver_version",
)
"""Tried in turn: nvidia-smi refuses a whole query for one field it does not know, and compute_cap came with 510."""

COMPUTE_CAPABILITY_OF_SOC = {"tegra234": (8, 7), "tegra264": (11, 0)}
"""Orin and Thor."""


def gpus_of(machine: Machine) -> tuple[list[Gpu], str | None]:
    """The GPUs nvidia-smi reports; on a Jetson without it, the one of the chip.

    Returns:
        The GPUs, and why there are none although nvidia-smi is installed.
    """
    soc = next((found for name, found in COMPUTE_CAPABILITY_OF_SOC.items() if name in _compatible(machine)), None)
    error = None
    for query in QUERIES:
        done = machine.run("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits")
        if done is None:
            break
        if done.exit_code == 0:
            names = query.split(",")
            rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
            gpus = [_gpu(dict(zip(names, row, strict=True)), soc) for row in rows if len(row) == len(names)]
            if gpus:
                return gpus, None
        error = " ".join((done.stdout + " " + done.stderr).split()) or "nvidia-smi reported no GPU"
    if soc is not None:
        return [Gpu(_model(machine) or "Jetson", soc, None, None, None, None, None)], None
    return [], error


def jetson_of(machine: Machine, system_packages: dict[str, str]) -> Jetson | None:
    """The Jetson this is; None on anything else.

    Args:
        machine: Where to read.
        system_packages: Installed Debian packages -> version.
    """
    from dflash_engines.tensorrt_versions import jetpack_for_l4t

    l4t = _l4t(machine.read_text("/etc/nv_tegra_release") or "")
    if l4t is None:  # a container has the package and not the file
        core = re.match(r"\d+\.\d+(\.\d+)?", system_packages.get("nvidia-l4t-core", ""))
        l4t = core[0] if core else None
    if l4t is None:
        return None
    row = jetpack_for_l4t(l4t)
    stated = system_packages.get("nvidia-jetpack", "").partition("+")[0].partition("-")[0]
    current, highest = _gpu_clocks(machine)
    return Jetson(
        model=_model(machine) or "Jetson",
        l4t=l4t,
        jetpack=stated or (row.name if row else None),
        power_mode=_power_mode(machine),
        gpu_clock_mhz=current,
        gpu_highest_clock_mhz=highest,
    )


def _gpu(row: dict[str, str], soc: tuple[int, int] | None) -> Gpu:
    stated = re.fullmatch(r"(\d+)\.(\d+)", row.get("compute_cap", ""))
    memory_mib = _number(row.get("memory.total"))
    clock, highest = _number(row.get("clocks.sm")), _number(row.get("clocks.max.sm"))
    return Gpu(
        name=row["name"],
        compute_capability=(int(stated[1]), int(stated[2])) if stated else soc,
        memory_bytes=None if memory_mib is None else int(memory_mib) * 1024 * 1024,
        driver=None if "N/A" in row["driver_version"] else row["driver_version"],
        clock_mhz=None if clock is None else int(clock),
        highest_clock_mhz=None if highest is None else int(highest),
        power_limit_watts=_number(row.get("power.limit")),
    )


def _number(text: str | None) -> float | None:
    """A cell of nvidia-smi; `[N/A]`, `[Not Supported]` and the like are None."""
    return float(text) if text is not None and re.fullmatch(r"\d+(\.\d+)?", text) else None


def _l4t(text: str) -> str | None:
    """`# R36 (release), REVISION: 4.3, GCID: ...` -> `36.4.3`."""
    found = re.search(r"R(\d+) \(release\), REVISION: (\d+(?:\.\d+)*)", text)
    return f"{found[1]}.{found[2]}" if found else None


def _model(machine: Machine) -> str | None:
    text = machine.read_text("/proc/device-tree/model")
    return text.strip("\0\n ") if text else None


def _compatible(machine: Machine) -> str:
    return machine.read_text("/proc/device-tree/compatible") or ""


def _power_mode(machine: Machine) -> str | None:
    done = machine.run("nvpmodel", "-q")
    found = re.search(r"NV Power Mode:\s*(\S+)", done.stdout if done else "")
    return found[1] if found else None


def _gpu_clocks(machine: Machine) -> tuple[int | None, int | None]:
    # 17000000.gpu on Orin, gpu-gpc-0 on Thor
    folders = machine.find_files("/sys/class/devfreq/*.gpu") + machine.find_files("/sys/class/devfreq/gpu-gpc-0")
    texts = [machine.read_text(f"{folders[0]}/{name}") if folders else None for name in ("cur_freq", "max_freq")]
    current, highest = (int(text) // 1_000_000 if text and text.strip().isdigit() else None for text in texts)
    return current, highest

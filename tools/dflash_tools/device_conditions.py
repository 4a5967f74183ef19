"""What a measured time depends on beside the program: the processor, its power mode, its clocks, other work."""

from __future__ import annotations

import dataclasses
import os
import re

from dflash_tools.doctor_gpu import gpus_of, jetson_of
from dflash_tools.machine_probe import Machine

NAMED_VARIABLES = ("GLIBC_TUNABLES", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "ORT_DISABLE_ALL_OPTIMIZATION")
"""Settings of the environment that change times."""


@dataclasses.dataclass(frozen=True)
class DeviceConditions:
    """The device and the state it was measured in; None where it could not be read."""

    device: str
    """Jetson, GPU or processor by name."""
    cpu: str
    num_cpus: int
    """This process may use."""
    power_mode: str | None
    """Jetson: as `nvpmodel -q` names it. Elsewhere the CPU's frequency governor."""
    highest_cpu_clock_mhz: int | None
    """What the system allows the CPU."""
    highest_gpu_clock_mhz: int | None
    gpu_power_limit_watts: float | None

    def differences(self, other: DeviceConditions) -> list[str]:
        """In what two conditions differ, in words; empty where times of one hold for the other."""
        return [
            f"{field.name.replace('_', ' ')} was {getattr(self, field.name)} and is {getattr(other, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        ]


@dataclasses.dataclass(frozen=True)
class MomentaryState:
    """What may change from minute to minute."""

    cpu_clock_mhz: int | None
    gpu_clock_mhz: int | None
    load_average: float | None
    """Of the last minute: processes that ran or wanted to run, ours included."""


def read_conditions(machine: Machine, *, uses_gpu: bool) -> DeviceConditions:
    """The conditions on this machine; of its GPU only where the backend uses one."""
    jetson = jetson_of(machine, {})
    gpus, _ = gpus_of(machine) if uses_gpu else ([], None)
    gpu = gpus[0] if gpus else None
    cpu = _cpu_name(machine)
    highest_gpu = jetson.gpu_highest_clock_mhz if jetson else gpu.highest_clock_mhz if gpu else None
    return DeviceConditions(
        device=jetson.model if jetson else gpu.name if gpu else cpu,
        cpu=cpu,
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        power_mode=jetson.power_mode if jetson else _first_line(machine, f"{_CPUFREQ}/scaling_governor"),
        highest_cpu_clock_mhz=_mhz(machine, "scaling_max_freq"),
        highest_gpu_clock_mhz=highest_gpu if uses_gpu else None,
        gpu_power_limit_watts=gpu.power_limit_watts if gpu else None,
    )


def read_state(machine: Machine, *, uses_gpu: bool) -> MomentaryState:
    """Clocks and load of this moment."""
    jetson = jetson_of(machine, {})
    gpus, _ = gpus_of(machine) if uses_gpu else ([], None)
    clock = jetson.gpu_clock_mhz if jetson else gpus[0].clock_mhz if gpus else None
    shown = re.search(r"^cpu MHz\s*:\s*(\d+)", machine.read_text("/proc/cpuinfo") or "", re.MULTILINE)
    cpu_clock = _mhz(machine, "scaling_cur_freq") or (int(shown[1]) if shown else None)
    load = (machine.read_text("/proc/loadavg") or "").split()
    return MomentaryState(cpu_clock, clock if uses_gpu else None, float(load[0]) if load else None)


def environment_settings() -> dict[str, str]:
    """Variables that change times, where they are set."""
    return {name: os.environ[name] for name in NAMED_VARIABLES if name in os.environ}


_CPUFREQ = "/sys/devices/system/cpu/cpu0/cpufreq"


def _cpu_name(machine: Machine) -> str:
    text = machine.read_text("/proc/cpuinfo") or ""
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else machine.architecture()


def _first_line(machine: Machine, path: str) -> str | None:
    text = machine.read_text(path)
    return text.strip() if text and text.strip() else None


def _mhz(machine: Machine, name: str) -> int | None:
    text = _first_line(machine, f"{_CPUFREQ}/{name}")
    return int(text) // 1000 if text and text.isdigit() else None

"""What `doctor` prints."""

from __future__ import annotations

from dflash_tools.doctor_backends import BackendReport
from dflash_tools.doctor_facts import Gpu, MachineFacts, TensorRt
from dflash_tools.doctor_traps import Trap
from dflash_tools.sizes import bytes_text


def report_lines(facts: MachineFacts, traps: list[Trap], backends: list[BackendReport]) -> list[str]:
    """The whole report, line by line."""
    lines = ["This machine", *(f"  {name:<12} {text}" for name, text in _machine_rows(facts)), "", "Known traps"]
    for trap in traps:
        lines += [f"  {trap.name}: {trap.what}", f"    -> {trap.do}"]
    lines += [] if traps else ["  none found"]
    lines += ["", "Backends"]
    for backend in backends:
        lines.append(f"  {backend.name:<12} {'can run' if backend.can_run else 'cannot run here yet'}")
        lines.append(f"    needs {backend.needs}")
        for lack in backend.lacks:
            lines += [f"    - {lack.what}", f"      -> {lack.do}"]
    ready = [backend.name for backend in backends if backend.can_run]
    return [*lines, "", f"Ready here: {', '.join(ready)}." if ready else "No backend can run here yet."]


def _machine_rows(facts: MachineFacts) -> list[tuple[str, str]]:
    python = facts.python
    where = "no virtual environment"
    if python.virtual_environment:
        seen = "sees" if python.sees_system_packages else "does not see"
        where = f"virtual environment {python.prefix}, {seen} the system's packages"
    rows = [("system", f"{facts.system}, {facts.architecture}"), ("python", f"{python.version}, {where}")]
    rows += _jetson_rows(facts)
    rows += [("gpu", _gpu_text(gpu)) for gpu in facts.gpus] or [("gpu", facts.gpu_error or "none found")]
    rows += [
        ("cuda", _cuda_text(facts)),
        ("tensorrt", "; ".join(_tensorrt_text(item) for item in facts.tensorrt) or "not installed"),
        ("onnxruntime", _onnxruntime_text(facts)),
        ("torch", _torch_text(facts)),
        ("memory", _memory_text(facts)),
        ("disk", f"{bytes_text(facts.free_disk_bytes)} free in {facts.folder}"),
    ]
    return rows


def _jetson_rows(facts: MachineFacts) -> list[tuple[str, str]]:
    jetson = facts.jetson
    if jetson is None:
        return []
    clocks = "unknown"
    if jetson.gpu_clock_mhz is not None and jetson.gpu_highest_clock_mhz is not None:
        clocks = f"{jetson.gpu_clock_mhz} of {jetson.gpu_highest_clock_mhz} MHz"
    return [
        ("jetson", f"{jetson.model}, JetPack {jetson.jetpack or 'unknown'}, Jetson Linux {jetson.l4t}"),
        ("power", f"mode {jetson.power_mode or 'unknown'}, GPU clock {clocks}"),
    ]


def _gpu_text(gpu: Gpu) -> str:
    parts = [gpu.name]
    if gpu.compute_capability is not None:
        major, minor = gpu.compute_capability
        parts.append(f"compute capability {major}.{minor} (SM {major}{minor})")
    parts.append(bytes_text(gpu.memory_bytes) if gpu.memory_bytes is not None else "shares the system's memory")
    if gpu.driver is not None:
        parts.append(f"driver {gpu.driver}")
    if gpu.clock_mhz is not None and gpu.highest_clock_mhz is not None:
        parts.append(f"{gpu.clock_mhz} of {gpu.highest_clock_mhz} MHz")
    if gpu.power_limit_watts is not None:
        parts.append(f"up to {gpu.power_limit_watts:.0f} W")
    return ", ".join(parts)


def _cuda_text(facts: MachineFacts) -> str:
    cuda = facts.cuda
    driver = f"driver up to {cuda.driver[0]}.{cuda.driver[1]}" if cuda.driver else "no driver"
    runtime = f"runtime {cuda.runtime[0]}.{cuda.runtime[1]} ({cuda.runtime_from})" if cuda.runtime else "no runtime"
    bindings = f"cuda-bindings {cuda.bindings}" if cuda.bindings else "no cuda-bindings"
    return f"{driver}, {runtime}, {bindings}, {'cuDNN ' + cuda.cudnn if cuda.cudnn else 'no cuDNN'}"


def _tensorrt_text(item: TensorRt) -> str:
    name = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT-RTX"}[item.flavour]
    return f"{name} {item.version} ({item.source}{'' if item.importable else ', no module for this Python'})"


def _onnxruntime_text(facts: MachineFacts) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in facts.onnxruntime.packages.items())
    return f"{packages}; providers {', '.join(facts.onnxruntime.providers)}" if packages else "not installed"


def _torch_text(facts: MachineFacts) -> str:
    if facts.torch is None:
        return "not installed (needed to export, not to run)"
    return f"{facts.torch.version}, " + (f"built for CUDA {facts.torch.cuda}" if facts.torch.cuda else "CPU build")


def _memory_text(facts: MachineFacts) -> str:
    memory = facts.memory
    if memory is None:
        return "unknown (no /proc/meminfo)"
    swap = f"{bytes_text(memory.free_swap_bytes)} of {bytes_text(memory.swap_bytes)} swap free"
    if not memory.swap_bytes:
        swap = "no swap"
    elif memory.disk_swap_bytes < memory.swap_bytes:
        swap += f", {bytes_text(memory.disk_swap_bytes)} of it on a disk"
    return f"{bytes_text(memory.available_bytes)} of {bytes_text(memory.total_bytes)} available, {swap}"

"""Known traps: what looks installed and does not work."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from dflash_tools.doctor_facts import MachineFacts, TensorRt
from dflash_tools.sizes import bytes_text

LOWEST_ONNXRUNTIME = (1, 24)
"""First with the operators of opset 24, TensorScatter among them."""
LOWEST_ONNXRUNTIME_GPU = (1, 30)
"""First whose GroupQueryAttention on CUDA takes the drafter's attention, which is not causal."""

LITTLE_MEMORY_BYTES = 4 * 10**9
SMALL_JETSON_BYTES = 16 * 10**9
GPU_BACKENDS = ("ort-cuda", "tensorrt", "tensorrt-rtx")


@dataclasses.dataclass(frozen=True)
class Trap:
    """A known trap this machine is in."""

    name: str
    what: str
    """What is wrong, with the values."""
    do: str
    """What to type or to do."""
    blocks: tuple[str, ...] = ()
    """Backends that cannot run before it is mended."""


def find_traps(facts: MachineFacts) -> list[Trap]:
    """The traps this machine is in, those that block a backend first."""
    checks: list[Callable[[MachineFacts], Trap | None]] = [
        _unloadable_tensorrt,
        _hidden_tensorrt,
        _python_of_another_jetpack,
        _unknown_jetpack,
        _bindings_of_another_cuda,
        _old_python,
        _two_onnxruntimes,
        _torch_of_a_newer_cuda,
        _little_memory,
    ]
    found = [check(facts) for check in checks]
    found += [_no_kernels(facts, item) for item in facts.tensorrt]
    found += [_tensorrt_of_a_newer_cuda(facts, item) for item in facts.tensorrt]
    return sorted((trap for trap in found if trap is not None), key=lambda trap: not trap.blocks)


def version_numbers(version: str) -> tuple[int, int]:
    """(major, minor) of a package's version; (0, 0) where it does not start with two numbers."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def cuda_major(facts: MachineFacts) -> int | None:
    """The CUDA major to install for: the driver's, else the installed runtime's."""
    known = facts.cuda.driver or facts.cuda.runtime
    return known[0] if known else None


def _unloadable_tensorrt(facts: MachineFacts) -> Trap | None:
    for library, words in facts.library_errors.items():
        if "libnvdla_compiler.so" in words:
            return Trap(
                "nvdla-compiler",
                f"{library} does not load: {words}. JetPack's TensorRT links the DLA compiler, used or not.",
                "sudo apt-get install nvidia-l4t-dla-compiler && sudo ldconfig   (in a container: start it with "
                "--runtime nvidia; where apt has no such package for this release, take the .deb of another R36.4 from "
                "https://repo.download.nvidia.com/jetson/common/pool/main/n/nvidia-l4t-dla-compiler/)",
                ("tensorrt",),
            )
        return Trap(
            "tensorrt-library",
            f"{library} does not load: {words}.",
            "Install the library that is named, or TensorRT again.",
            ("tensorrt",),
        )
    return None


def _hidden_tensorrt(facts: MachineFacts) -> Trap | None:
    hidden = [item for item in facts.tensorrt if item.source == "apt" and not item.importable]
    if not hidden or facts.python.sees_system_packages:
        return None
    return Trap(
        "isolated-environment",
        f"The virtual environment {facts.python.prefix} hides the system's TensorRT {hidden[0].version}: it was made "
        "without --system-site-packages.",
        "python3 -m venv --system-site-packages ~/dflash && . ~/dflash/bin/activate && "
        "pip install 'dflash-export[engines]'",
        ("tensorrt",),
    )


def _python_of_another_jetpack(facts: MachineFacts) -> Trap | None:
    from dflash_engines.tensorrt_versions import jetpack_for_l4t

    row = jetpack_for_l4t(facts.jetson.l4t) if facts.jetson else None
    here = ".".join(facts.python.version.split(".")[:2])
    if row is None or here == row.python:
        return None
    return Trap(
        "python-version",
        f"The TensorRT module of JetPack {row.name} is for Python {row.python}; this is Python {facts.python.version}.",
        f"/usr/bin/python{row.python} -m venv --system-site-packages ~/dflash && . ~/dflash/bin/activate && "
        "pip install 'dflash-export[engines]'",
        ("tensorrt",),
    )


def _unknown_jetpack(facts: MachineFacts) -> Trap | None:
    from dflash_engines.tensorrt_versions import JETPACKS, jetpack_for_l4t

    if facts.jetson is None or jetpack_for_l4t(facts.jetson.l4t) is not None:
        return None
    known = ", ".join(f"{row.name} (R{row.l4t[0][0]})" for row in JETPACKS)
    return Trap(
        "jetpack-release",
        f"Jetson Linux {facts.jetson.l4t} is of no JetPack release that graphs were written for: {known}.",
        "Flash or update to one of them; see https://developer.nvidia.com/embedded/jetpack",
    )


def _bindings_of_another_cuda(facts: MachineFacts) -> Trap | None:
    major = cuda_major(facts)
    if facts.cuda.bindings is None or major is None:
        return None
    have = version_numbers(facts.cuda.bindings)[0]
    if have == major:
        return None
    newer = facts.cuda.driver is not None and have > facts.cuda.driver[0]
    whose = "driver" if facts.cuda.driver else "runtime"
    return Trap(
        "cuda-bindings",
        f"cuda-bindings {facts.cuda.bindings} is for CUDA {have}, the {whose} here is of CUDA {major}"
        + (": its calls do not exist in this driver." if newer else "."),
        f"pip install 'cuda-bindings=={major}.*'",
        GPU_BACKENDS if newer else (),
    )


def _old_python(facts: MachineFacts) -> Trap | None:
    versions = [version_numbers(version) for version in facts.onnxruntime.packages.values()]
    if version_numbers(facts.python.version) >= (3, 11) or any(item >= LOWEST_ONNXRUNTIME for item in versions):
        return None
    return Trap(
        "python-3.10",
        f"The newest onnxruntime for Python {facts.python.version} is 1.23.2: it has no TensorScatter and refuses "
        "graphs of opset 24.",
        "Use Python 3.11 or newer for ONNX Runtime (the backend tensorrt runs on this Python), for example: "
        "uv venv --python 3.12 ~/dflash-ort && . ~/dflash-ort/bin/activate && uv pip install 'dflash-export[ort]'",
        ("ort-cpu", "ort-cuda"),
    )


def _two_onnxruntimes(facts: MachineFacts) -> Trap | None:
    packages = facts.onnxruntime.packages
    if len(packages) < 2:
        return None
    names = " and ".join(f"{name} {version}" for name, version in packages.items())
    keep = "onnxruntime-gpu" if facts.gpus and "onnxruntime-gpu" in packages else "onnxruntime"
    return Trap(
        "two-onnxruntimes",
        f"{names} are both installed into one folder: the one installed last has overwritten the other.",
        f"pip uninstall -y {' '.join(packages)} && pip install '{keep}>=1.24'",
    )


def _torch_of_a_newer_cuda(facts: MachineFacts) -> Trap | None:
    torch, driver = facts.torch, facts.cuda.driver
    if torch is None or torch.cuda is None or driver is None or version_numbers(torch.cuda)[0] <= driver[0]:
        return None
    return Trap(
        "torch-cuda",
        f"torch {torch.version} is built for CUDA {torch.cuda}, the driver runs CUDA up to {driver[0]}.{driver[1]}: "
        "torch does not see the GPU. Exporting works, on the CPU.",
        "Update the driver, or: pip install torch --index-url https://download.pytorch.org/whl/cu126"
        if driver[0] == 12
        else "Update the driver.",
    )


def _little_memory(facts: MachineFacts) -> Trap | None:
    memory = facts.memory
    if memory is None or not facts.gpus:
        return None
    free = memory.available_bytes + memory.free_swap_bytes
    small = facts.jetson is not None and memory.total_bytes < SMALL_JETSON_BYTES
    if free >= LITTLE_MEMORY_BYTES and not (small and memory.disk_swap_bytes < LITTLE_MEMORY_BYTES):
        return None
    return Trap(
        "memory",
        f"{bytes_text(memory.available_bytes)} of memory are available, with {bytes_text(memory.disk_swap_bytes)} of "
        "swap on a disk. An engine with embedded weights needs several times their size while it is built.",
        "sudo fallocate -l 8G /swapfile && sudo chmod 600 /swapfile && sudo mkswap /swapfile && sudo swapon /swapfile",
    )


def _no_kernels(facts: MachineFacts, item: TensorRt) -> Trap | None:
    from dflash_engines.tensorrt_versions import lacks_kernels

    for gpu in facts.gpus:
        reason = lacks_kernels(item.flavour, item.version, gpu.compute_capability) if gpu.compute_capability else None
        if reason is not None:
            return Trap(
                "no-kernels",
                f"{reason} This GPU is {gpu.name}.",
                "Use the backend tensorrt." if item.flavour == "tensorrt-rtx" else "Update TensorRT.",
                (item.flavour,),
            )
    return None


def _tensorrt_of_a_newer_cuda(facts: MachineFacts, item: TensorRt) -> Trap | None:
    driver = facts.cuda.driver
    if driver is None or item.cuda_major is None or item.cuda_major <= driver[0]:
        return None
    return Trap(
        "tensorrt-cuda",
        f"{item.flavour} {item.version} is built for CUDA {item.cuda_major}, the driver runs CUDA up to "
        f"{driver[0]}.{driver[1]}.",
        f"Update the driver, or: pip uninstall -y {item.flavour} {item.flavour}-cu{item.cuda_major} && "
        f"pip install {item.flavour}-cu{driver[0]}",
        (item.flavour,),
    )

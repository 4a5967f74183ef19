"""From a machine's files and commands to facts."""

from __future__ import annotations

import json
import re

from dflash_tools.doctor_facts import (
    Cuda,
    MachineFacts,
    Memory,
    OnnxRuntime,
    Python,
    TensorRt,
    Torch,
)
from dflash_tools.doctor_gpu import Answers, gpus_of, jetson_of
from dflash_tools.machine_probe import Machine

LIBRARIES = (
    "libcuda.so.1",
    "libcudart.so.12",
    "libcudart.so.13",
    "libcudnn.so.9",
    "libnvinfer.so.10",
    "libnvinfer.so.11",
)
TENSORRT_PIP = {
    "tensorrt": ("tensorrt", "tensorrt-cu12", "tensorrt-cu13"),
    "tensorrt-rtx": ("tensorrt-rtx", "tensorrt-rtx-cu12", "tensorrt-rtx-cu13"),
}
TENSORRT_MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
SYSTEM_PACKAGES = ("nvidia-jetpack", "nvidia-l4t-core", "python3-libnvinfer", "libnvinfer10", "libnvinfer11")
OTHER_PACKAGES = ("onnx-ir", "ml-dtypes", "polygraphy", "onnx", "transformers")


def read_facts(machine: Machine) -> MachineFacts:
    """Reads everything `doctor` reports."""
    libraries = machine.libraries(LIBRARIES)
    dpkg = _system_packages(machine)
    gpus, gpu_error = gpus_of(machine)
    folder = machine.working_folder()
    return MachineFacts(
        system=_system(machine),
        architecture=machine.architecture(),
        python=_python(machine),
        gpus=gpus,
        gpu_error=gpu_error,
        jetson=jetson_of(machine, dpkg),
        cuda=_cuda(machine, libraries),
        tensorrt=_tensorrt(machine, dpkg, libraries),
        library_errors=_library_errors(libraries),
        onnxruntime=_onnxruntime(machine),
        torch=_torch(machine),
        packages=_versions(machine, OTHER_PACKAGES),
        memory=_memory(machine),
        free_disk_bytes=machine.free_disk_bytes(folder),
        folder=folder,
    )


def _versions(machine: Machine, names: tuple[str, ...]) -> dict[str, str]:
    found = {name: machine.package_version(name) for name in names}
    return {name: version for name, version in found.items() if version is not None}


def _system(machine: Machine) -> str:
    named = re.search(r'^PRETTY_NAME="?([^"\n]+)"?', machine.read_text("/etc/os-release") or "", re.MULTILINE)
    return named[1] if named else machine.operating_system()


def _python(machine: Machine) -> Python:
    prefix, virtual = machine.python_prefix(), machine.in_virtual_environment()
    settings = machine.read_text(f"{prefix}/pyvenv.cfg") or ""
    sees = not virtual or re.search(r"^include-system-site-packages\s*=\s*true", settings, re.M | re.I) is not None
    return Python(machine.python_version(), prefix, virtual, sees)


def _system_packages(machine: Machine) -> dict[str, str]:
    # dpkg-query ends with 1 when one of the names is unknown, and still prints the others.
    done = machine.run("dpkg-query", "-W", "-f", "${db:Status-Abbrev}\t${Package}\t${Version}\n", *SYSTEM_PACKAGES)
    rows = [line.split("\t") for line in done.stdout.splitlines()] if done else []
    return {row[1]: row[2] for row in rows if len(row) == 3 and row[0].startswith("ii")}


def _cuda(machine: Machine, libraries: Answers) -> Cuda:
    runtime, source = _cuda_runtime(machine, libraries)
    cudnn = next(iter(_versions(machine, ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")).values()), None)
    if cudnn is None and "version" in libraries.get("libcudnn.so.9", {}):
        cudnn = "installed"
    bindings = machine.package_version("cuda-bindings")
    return Cuda(_driver_cuda(machine, libraries), runtime, source, bindings, cudnn)


def _driver_cuda(machine: Machine, libraries: Answers) -> tuple[int, int] | None:
    stated = libraries.get("libcuda.so.1", {}).get("version")
    if stated:
        return _cuda_number(int(stated))
    done = machine.run("nvidia-smi")
    shown = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", done.stdout if done else "")
    return (int(shown[1]), int(shown[2])) if shown else None


def _cuda_runtime(machine: Machine, libraries: Answers) -> tuple[tuple[int, int] | None, str | None]:
    path = "/usr/local/cuda/version.json"
    text = machine.read_text(path)
    if text is not None and (shown := _toolkit_version(text)) is not None:
        return shown, path
    for name in ("libcudart.so.13", "libcudart.so.12"):
        stated = libraries.get(name, {}).get("version")
        if stated:
            return _cuda_number(int(stated)), name
    for name in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12"):
        version = machine.package_version(name)
        found = re.match(r"(\d+)\.(\d+)", version or "")
        if found:
            return (int(found[1]), int(found[2])), f"pip {name}"
    return None, None


def _toolkit_version(text: str) -> tuple[int, int] | None:
    try:
        version = json.loads(text)["cuda"]["version"]
    except (ValueError, KeyError, TypeError):  # not the file NVIDIA writes: the libraries are asked instead
        return None
    found = re.match(r"(\d+)\.(\d+)", str(version))
    return (int(found[1]), int(found[2])) if found else None


def _cuda_number(number: int) -> tuple[int, int]:
    return number // 1000, number % 1000 // 10  # 12060 is 12.6


def _tensorrt(machine: Machine, dpkg: dict[str, str], libraries: Answers) -> list[TensorRt]:
    folders = {flavour: machine.module_folder(module) for flavour, module in TENSORRT_MODULES.items()}
    found = []
    for flavour, names in TENSORRT_PIP.items():
        versions = _versions(machine, names)
        # The module of python3-libnvinfer is a distribution too, in dist-packages; apt reports it below.
        of_apt = flavour == "tensorrt" and "python3-libnvinfer" in dpkg and "dist-packages" in (folders[flavour] or "")
        if versions and not of_apt:
            major = re.search(r"-cu(\d+)$", max(versions))
            version = next(iter(versions.values()))
            found.append(
                TensorRt(flavour, version, "pip", folders[flavour] is not None, int(major[1]) if major else None)
            )
    system = next((dpkg[name] for name in SYSTEM_PACKAGES[2:] if name in dpkg), None)
    if system is not None:
        importable = folders["tensorrt"] is not None and "python3-libnvinfer" in dpkg
        major = re.search(r"\+cuda(\d+)", system)
        found.append(TensorRt("tensorrt", system, "apt", importable, int(major[1]) if major else None))
    if not any(item.flavour == "tensorrt" for item in found):
        found += _bare_library(libraries, folders["tensorrt"] is not None)
    return found


def _bare_library(libraries: Answers, importable: bool) -> list[TensorRt]:
    for name in ("libnvinfer.so.11", "libnvinfer.so.10"):
        number = int(libraries.get(name, {}).get("version", 0))
        if number:  # 101602 is 10.16.2
            version = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
            return [TensorRt("tensorrt", version, "library", importable, None)]
    return []


def _library_errors(libraries: Answers) -> dict[str, str]:
    errors = {}
    for name in ("libnvinfer.so.10", "libnvinfer.so.11"):
        words = str(libraries.get(name, {}).get("error", ""))
        if words and not words.startswith(f"{name}: cannot open shared object file"):  # that means: not installed
            errors[name] = words
    return errors


def _onnxruntime(machine: Machine) -> OnnxRuntime:
    names = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-trt-rtx")
    packages = _versions(machine, names)
    folder = machine.module_folder("onnxruntime")
    if folder is None:
        return OnnxRuntime(packages, [])
    files = machine.find_files(f"{folder}/capi/*onnxruntime_providers_*")
    shown = [re.search(r"onnxruntime_providers_(\w+)\.(?:so|dll|dylib)", path) for path in files]
    return OnnxRuntime(packages, ["cpu", *sorted({hit[1] for hit in shown if hit and hit[1] != "shared"})])


def _torch(machine: Machine) -> Torch | None:
    version, folder = machine.package_version("torch"), machine.module_folder("torch")
    if version is None or folder is None:
        return None
    text = machine.read_text(f"{folder}/version.py") or ""
    built_for = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return Torch(version, built_for[1] if built_for else None)


def _memory(machine: Machine) -> Memory | None:
    text = machine.read_text("/proc/meminfo")
    if text is None:
        return None
    sizes = {name: int(count) * 1024 for name, count in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    swaps = [line.split() for line in (machine.read_text("/proc/swaps") or "").splitlines()[1:]]
    on_disk = sum(int(row[2]) * 1024 for row in swaps if len(row) >= 3 and "zram" not in row[0])
    total = sizes.get("MemTotal", 0)
    available = sizes.get("MemAvailable", sizes.get("MemFree", 0))
    return Memory(total, available, sizes.get("SwapTotal", 0), sizes.get("SwapFree", 0), on_disk)

"""What each backend needs and lacks on a machine, and what to type to get it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Set

from dflash_runtime.errors import EngineError
from dflash_tools.doctor_facts import MachineFacts, TensorRt
from dflash_tools.doctor_traps import LOWEST_ONNXRUNTIME, LOWEST_ONNXRUNTIME_GPU, Trap, cuda_major, version_numbers

NEEDS = {
    "ort-cpu": "onnxruntime 1.24 or newer",
    "ort-cuda": "an NVIDIA GPU with its driver, onnxruntime-gpu 1.30 or newer, CUDA and cuDNN libraries, cuda-bindings",
    "tensorrt": "an NVIDIA GPU with its driver, TensorRT 10.3 to 11.x with its Python module, cuda-bindings of the "
    "driver's CUDA, onnx-ir to lower the graphs here",
    "tensorrt-rtx": "an NVIDIA GPU of compute capability 7.5, 8.0, 8.6, 8.9, 12.0 or 12.1 with its driver, "
    "TensorRT-RTX 1.7 or newer, cuda-bindings of the driver's CUDA, onnx-ir to lower the graphs here (engines can be "
    "built without a GPU)",
}


@dataclasses.dataclass(frozen=True)
class Lack:
    """One thing a backend lacks."""

    what: str
    do: str
    """What to type or to do."""


@dataclasses.dataclass(frozen=True)
class BackendReport:
    """A backend on this machine."""

    name: str
    needs: str
    lacks: list[Lack]

    @property
    def can_run(self) -> bool:
        """Whether it lacks nothing."""
        return not self.lacks


def backend_reports(facts: MachineFacts, traps: list[Trap], in_program: Collection[str]) -> list[BackendReport]:
    """One report for each backend.

    Args:
        facts: The machine.
        traps: Those it is in; one that blocks a backend is something the backend lacks.
        in_program: Backends this version of the program has.
    """
    return [BackendReport(name, needs, _lacks(name, facts, traps, in_program)) for name, needs in NEEDS.items()]


def _lacks(name: str, facts: MachineFacts, traps: list[Trap], in_program: Collection[str]) -> list[Lack]:
    blocking = [trap for trap in traps if name in trap.blocks]
    lacks = [Lack(f"the trap {trap.name} is in the way", trap.do) for trap in blocking]
    lacks += CHECKS[name](facts, {trap.name for trap in blocking}, name)
    if name not in in_program:
        lacks.append(
            Lack("this version of dflash-export does not have it", "Update dflash-export once a version has it.")
        )
    return lacks


def _for_ort_cpu(facts: MachineFacts, traps: Set[str], _: str) -> list[Lack]:
    if "python-3.10" in traps:
        return []  # nothing to install on this Python
    packages = facts.onnxruntime.packages
    if not facts.onnxruntime.providers:
        return [Lack("onnxruntime is not installed", "pip install 'dflash-export[ort]'")]
    newest = max(packages.values(), key=version_numbers, default="0.0")
    if version_numbers(newest) < LOWEST_ONNXRUNTIME:
        return [Lack(f"onnxruntime {newest} is too old: 1.24 is needed", "pip install -U 'dflash-export[ort]'")]
    return []


def _for_ort_cuda(facts: MachineFacts, traps: Set[str], _: str) -> list[Lack]:
    lacks = _gpu_lacks(facts)
    if facts.architecture == "aarch64":
        return [*lacks, Lack("PyPI has no onnxruntime-gpu for aarch64", "Use the backend tensorrt.")]
    install = "pip uninstall -y onnxruntime; pip install 'onnxruntime-gpu[cuda,cudnn]>=1.30'"
    version = facts.onnxruntime.packages.get("onnxruntime-gpu")
    if "python-3.10" in traps:
        return lacks
    if version is None:
        lacks.append(Lack("onnxruntime-gpu is not installed", install))
    elif version_numbers(version) < LOWEST_ONNXRUNTIME_GPU:
        lacks.append(Lack(f"onnxruntime-gpu {version} is too old: 1.30 is needed", install))
    elif "cuda" not in facts.onnxruntime.providers:
        lacks.append(Lack("onnxruntime's folder holds no CUDA provider", install))
    if facts.gpus and facts.cuda.cudnn is None:
        lacks.append(Lack("cuDNN was not found", "pip install 'onnxruntime-gpu[cuda,cudnn]>=1.30'"))
    return lacks + _bindings_lack(facts)


def _bindings_lack(facts: MachineFacts) -> list[Lack]:
    if facts.cuda.bindings is not None:
        return []
    return [Lack("cuda-bindings is not installed", f"pip install 'cuda-bindings=={cuda_major(facts) or 13}.*'")]


def _for_tensorrt(facts: MachineFacts, traps: Set[str], flavour: str) -> list[Lack]:
    lacks = _gpu_lacks(facts)
    hopeless = _hopeless(facts, flavour)
    if hopeless is not None and "no-kernels" not in traps:
        return [*lacks, hopeless]
    if "no-kernels" in traps and flavour == "tensorrt-rtx":
        return lacks
    lacks += _installation_lacks(facts, traps, flavour)
    lacks += _bindings_lack(facts)
    missing = [name for name in ("onnx-ir", "ml-dtypes") if name not in facts.packages]
    if missing:
        lacks.append(Lack(f"{' and '.join(missing)} not installed", "pip install 'dflash-export[engines]'"))
    return lacks


def _hopeless(facts: MachineFacts, flavour: str) -> Lack | None:
    """The flavour that is not installed could not build for this GPU either."""
    from dflash_engines.tensorrt_versions import lacks_kernels

    if flavour != "tensorrt-rtx" or not facts.gpus or facts.gpus[0].compute_capability is None:
        return None
    reason = lacks_kernels(flavour, "1.7", facts.gpus[0].compute_capability)
    return Lack(reason.rstrip("."), "Use the backend tensorrt.") if reason else None


def _installation_lacks(facts: MachineFacts, traps: Set[str], flavour: str) -> list[Lack]:
    from dflash_engines.tensorrt_versions import form_for

    installed = [item for item in facts.tensorrt if item.flavour == flavour]
    if not installed:
        return [Lack(f"{_spoken(flavour)} is not installed", _install(facts, flavour))]
    best = max(installed, key=lambda item: item.importable)
    try:
        form_for(flavour, best.version)
    except EngineError as error:
        return [Lack(str(error), _install(facts, flavour))]
    if not best.importable and not traps & {"isolated-environment", "python-version"}:
        return [
            Lack(f"this Python does not find the module of {_spoken(flavour)} {best.version}", _module(facts, best))
        ]
    return []


def _gpu_lacks(facts: MachineFacts) -> list[Lack]:
    if not facts.gpus:
        said = f"nvidia-smi said: {facts.gpu_error}" if facts.gpu_error else "nvidia-smi is not here"
        return [Lack(f"no NVIDIA GPU was found ({said})", "On a machine with one, install its driver: "
                     "https://www.nvidia.com/drivers (Ubuntu: sudo ubuntu-drivers install)")]  # fmt: skip
    if facts.gpus[0].compute_capability is None:
        return [Lack(f"the driver does not state the compute capability of {facts.gpus[0].name}",
                     "Update the driver: 510 or newer")]  # fmt: skip
    return []


def _install(facts: MachineFacts, flavour: str) -> str:
    if flavour == "tensorrt-rtx":
        return "pip install 'dflash-export[tensorrt-rtx]' 'tensorrt-rtx>=1.7'"
    if facts.jetson is not None:
        return (
            "sudo apt-get update && sudo apt-get install python3-libnvinfer && "
            "python3 -m venv --system-site-packages ~/dflash"
        )
    return f"pip install 'tensorrt-cu{cuda_major(facts) or 13}>=10.15'"


def _module(facts: MachineFacts, item: TensorRt) -> str:
    if item.source == "apt" or facts.jetson is not None:
        return "sudo apt-get install python3-libnvinfer"
    return f"pip install --force-reinstall '{item.flavour}=={item.version}'"


def _spoken(flavour: str) -> str:
    return {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT-RTX"}[flavour]


CHECKS = {
    "ort-cpu": _for_ort_cpu,
    "ort-cuda": _for_ort_cuda,
    "tensorrt": _for_tensorrt,
    "tensorrt-rtx": _for_tensorrt,
}

"""What `doctor` knows about a machine; each value is None where it could not be read."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU."""

    name: str
    compute_capability: tuple[int, int] | None
    """(8, 9) is SM 89."""
    memory_bytes: int | None
    """Of its own; None where it shares the system's memory."""
    driver: str | None
    clock_mhz: int | None
    """SM clock now."""
    highest_clock_mhz: int | None
    power_limit_watts: float | None


@dataclasses.dataclass(frozen=True)
class Jetson:
    """An NVIDIA Jetson and its system."""

    model: str
    l4t: str
    """Release of Jetson Linux, `36.4.3`."""
    jetpack: str | None
    """From the package nvidia-jetpack, else the row of the version table; None for a release it does not know."""
    power_mode: str | None
    """As `nvpmodel -q` names it."""
    gpu_clock_mhz: int | None
    gpu_highest_clock_mhz: int | None


@dataclasses.dataclass(frozen=True)
class Python:
    """The Python that runs this program."""

    version: str
    prefix: str
    virtual_environment: bool
    sees_system_packages: bool
    """False in a virtual environment made without --system-site-packages."""


@dataclasses.dataclass(frozen=True)
class Cuda:
    """CUDA as far as it is installed; versions as (major, minor)."""

    driver: tuple[int, int] | None
    """Highest CUDA the driver runs."""
    runtime: tuple[int, int] | None
    runtime_from: str | None
    """Where the runtime's version was read."""
    bindings: str | None
    """Version of the package cuda-bindings."""
    cudnn: str | None
    """Version, or `installed`."""


@dataclasses.dataclass(frozen=True)
class TensorRt:
    """One installed TensorRT."""

    flavour: str
    """`tensorrt` or `tensorrt-rtx`."""
    version: str
    source: str
    """`pip`, `apt`, or `library` where only libnvinfer was found."""
    importable: bool
    """Whether this Python finds its module."""
    cuda_major: int | None
    """CUDA it was built for, where the package says so."""


@dataclasses.dataclass(frozen=True)
class OnnxRuntime:
    """The installed packages of ONNX Runtime, and what the folder they share can execute on."""

    packages: dict[str, str]
    """Package -> version."""
    providers: list[str]
    """`cpu`, `cuda`, `tensorrt`, `nv_tensorrt_rtx`, read from the files in the package."""


@dataclasses.dataclass(frozen=True)
class Torch:
    """An installed PyTorch."""

    version: str
    cuda: str | None
    """CUDA it was built for; None for the CPU build."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """The system's memory in bytes."""

    total_bytes: int
    available_bytes: int
    swap_bytes: int
    free_swap_bytes: int
    disk_swap_bytes: int
    """Swap that is not compressed memory (zram)."""


@dataclasses.dataclass(frozen=True)
class MachineFacts:
    """Everything."""

    system: str
    architecture: str
    python: Python
    gpus: list[Gpu]
    gpu_error: str | None
    """Why nvidia-smi reported nothing although it is installed."""
    jetson: Jetson | None
    cuda: Cuda
    tensorrt: list[TensorRt]
    library_errors: dict[str, str]
    """TensorRT's libraries that lie here but do not load -> the loader's words."""
    onnxruntime: OnnxRuntime
    torch: Torch | None
    packages: dict[str, str]
    """Other packages of ours that are installed -> version."""
    memory: Memory | None
    free_disk_bytes: int
    folder: str
    """The folder whose disk that is."""

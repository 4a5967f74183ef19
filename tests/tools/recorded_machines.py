"""Machines as their own files and commands tell them; the formats are those of real machines."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Sequence

from dflash_tools.machine_probe import CommandResult, Machine

GIB = 1 << 30
GPU_QUERY = (
    "nvidia-smi --query-gpu=name,compute_cap,memory.total,driver_version,clocks.sm,clocks.max.sm,power.limit "
    "--format=csv,noheader,nounits"
)


@dataclasses.dataclass
class RecordedMachine(Machine):
    """Answers from dictionaries; what is not in them is not there."""

    system: str = "Linux"
    arch: str = "x86_64"
    python: str = "3.12.3"
    prefix: str = "/home/user/dflash"
    virtual: bool = True
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    commands: dict[str, CommandResult] = dataclasses.field(default_factory=dict)
    """First words of a command -> how it ends."""
    packages: dict[str, str] = dataclasses.field(default_factory=dict)
    modules: dict[str, str] = dataclasses.field(default_factory=dict)
    """Module -> its folder."""
    library_answers: dict[str, dict[str, str | int]] = dataclasses.field(default_factory=dict)
    free_bytes: int = 100 * GIB

    def operating_system(self) -> str:
        return self.system

    def architecture(self) -> str:
        return self.arch

    def python_version(self) -> str:
        return self.python

    def python_prefix(self) -> str:
        return self.prefix

    def in_virtual_environment(self) -> bool:
        return self.virtual

    def working_folder(self) -> str:
        return "/home/user"

    def read_text(self, path: str) -> str | None:
        return self.files.get(path)

    def find_files(self, pattern: str) -> list[str]:
        folders = {path.rpartition("/")[0] for path in self.files}
        return sorted(path for path in {*self.files, *folders} if fnmatch.fnmatch(path, pattern))

    def run(self, *command: str) -> CommandResult | None:
        told = " ".join(command)
        fitting = [start for start in self.commands if told == start or told.startswith(start + " ")]
        return self.commands[max(fitting, key=len)] if fitting else None

    def package_version(self, distribution: str) -> str | None:
        return self.packages.get(distribution)

    def module_folder(self, module: str) -> str | None:
        return self.modules.get(module)

    def libraries(self, names: Sequence[str]) -> dict[str, dict[str, str | int]]:
        return {name: self.library_answers.get(name, absent(name)) for name in names}

    def free_disk_bytes(self, folder: str) -> int:
        return self.free_bytes


def absent(name: str) -> dict[str, str | int]:
    return {"error": f"{name}: cannot open shared object file: No such file or directory"}


def printed(text: str) -> CommandResult:
    return CommandResult(0, text, "")


def meminfo(total_kb: int, available_kb: int, swap_kb: int = 0) -> str:
    return (
        f"MemTotal:       {total_kb} kB\nMemFree:          500000 kB\nMemAvailable:   {available_kb} kB\n"
        f"SwapTotal:      {swap_kb} kB\nSwapFree:       {swap_kb} kB\n"
    )


def toolkit(version: str) -> str:
    """The file of a CUDA toolkit."""
    return f'{{\n   "cuda" : {{\n      "name" : "CUDA SDK",\n      "version" : "{version}"\n   }}\n}}\n'


def installed(machine: RecordedMachine, name: str, version: str, module: str = "") -> None:
    """A package from an index, in the machine's environment."""
    machine.packages[name] = version
    if module:
        folder = f"{machine.prefix}/lib/python3/site-packages/{module}"
        machine.modules[module] = folder
        machine.files[f"{folder}/__init__.py"] = ""


def dpkg(*rows: tuple[str, str]) -> CommandResult:
    return CommandResult(1, "".join(f"ii \t{name}\t{version}\n" for name, version in rows), "dpkg-query: no packages")


def bare_cpu() -> RecordedMachine:
    return RecordedMachine(
        python="3.11.2",
        virtual=False,
        prefix="/usr",
        files={
            "/etc/os-release": 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nNAME="Debian GNU/Linux"\n',
            "/proc/meminfo": meminfo(16_000_000, 14_000_000),
            "/proc/swaps": "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n",
        },
        commands={"dpkg-query": CommandResult(1, "", "dpkg-query: no packages found matching nvidia-jetpack\n")},
    )


def workstation() -> RecordedMachine:
    """An RTX 4090 with TensorRT-RTX, ready."""
    machine = RecordedMachine(
        files={
            "/etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04.3 LTS"\n',
            "/home/user/dflash/pyvenv.cfg": "home = /usr/bin\ninclude-system-site-packages = false\nversion = 3.12.3\n",
            "/proc/meminfo": meminfo(65_700_000, 60_000_000, 8_388_604),
            "/proc/swaps": "Filename\tType\tSize\tUsed\tPriority\n/swap.img file 8388604 0 -2\n",
        },
        commands={
            "nvidia-smi": printed("| NVIDIA-SMI 580.95.05   Driver Version: 580.95.05   CUDA Version: 13.0     |\n"),
        },
        library_answers={"libcuda.so.1": {"version": 13000}, "libcudart.so.13": {"version": 13000}},
    )
    gpus(machine, "NVIDIA GeForce RTX 4090, 8.9, 24564, 580.95.05, 210, 3105, 450.00\n")
    for name, version, module in (
        ("tensorrt-rtx", "1.7.1.116", "tensorrt_rtx"),
        ("tensorrt-rtx-cu13", "1.7.1.116", ""),
        ("cuda-bindings", "13.0.3", ""),
        ("onnx-ir", "1.1.0", ""),
        ("ml-dtypes", "0.6.0", ""),
        ("onnxruntime", "1.32.0", "onnxruntime"),
    ):
        installed(machine, name, version, module)
    return machine


def gpus(machine: RecordedMachine, rows: str) -> None:
    """What nvidia-smi answers to the query for GPUs."""
    machine.commands[GPU_QUERY] = printed(rows)


def server() -> RecordedMachine:
    """An H200 where somebody installed TensorRT-RTX and bindings of a CUDA the driver does not have."""
    machine = workstation()
    gpus(machine, "NVIDIA H200, 9.0, 143771, 570.172.08, 345, 1980, 700.00\n")
    machine.library_answers = {"libcuda.so.1": {"version": 12080}}
    machine.packages["cuda-bindings"] = "13.1.1"
    installed(machine, "onnxruntime-gpu", "1.32.0")
    folder = machine.modules["onnxruntime"]
    for name in ("shared", "cuda", "tensorrt"):
        machine.files[f"{folder}/capi/libonnxruntime_providers_{name}.so"] = ""
    installed(machine, "torch", "2.13.0", "torch")
    machine.files[f"{machine.modules['torch']}/version.py"] = (
        "from typing import Optional\n\n__version__ = '2.13.0+cu130'\ndebug = False\ncuda: Optional[str] = '13.0'\n"
    )
    return machine


def orin_nano() -> RecordedMachine:
    """JetPack 6.2 with everything in its way: an isolated environment, and no DLA compiler."""
    return RecordedMachine(
        arch="aarch64",
        python="3.10.12",
        files={
            "/etc/os-release": 'PRETTY_NAME="Ubuntu 22.04.5 LTS"\nNAME="Ubuntu"\n',
            "/etc/nv_tegra_release": (
                "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64, "
                "DATE: Wed Jan  8 01:49:37 UTC 2025\n# KERNEL_VARIANT: oot\nTARGET_USERSPACE_LIB_DIR=nvidia\n"
                "TARGET_USERSPACE_LIB_DIR_PATH=usr/lib/aarch64-linux-gnu/nvidia\n"
            ),
            "/proc/device-tree/model": "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super\0",
            "/proc/device-tree/compatible": "nvidia,p3768-0000+p3767-0005-super\0nvidia,p3767-0005\0nvidia,tegra234\0",
            "/home/user/dflash/pyvenv.cfg": "home = /usr/bin\ninclude-system-site-packages = false\n",
            "/usr/local/cuda/version.json": toolkit("12.6.11"),
            "/sys/class/devfreq/17000000.gpu/cur_freq": "306000000\n",
            "/sys/class/devfreq/17000000.gpu/max_freq": "1020000000\n",
            "/proc/meminfo": meminfo(7_803_000, 5_900_000, 3_901_500),
            "/proc/swaps": "Filename\tType\tSize\tUsed\tPriority\n"
            + "".join(f"/dev/zram{index} partition 650240 0 5\n" for index in range(6)),
        },
        commands={
            "nvidia-smi": printed("| NVIDIA-SMI 540.4.0   Driver Version: 540.4.0   CUDA Version: 12.6     |\n"),
            GPU_QUERY: printed("Orin (nvgpu), 8.7, [N/A], 540.4.0, [N/A], [N/A], [N/A]\n"),
            "nvpmodel -q": printed("NV Power Mode: MAXN_SUPER\n2\n"),
            "dpkg-query": dpkg(
                ("libnvinfer10", "10.3.0.30-1+cuda12.5"),
                ("nvidia-jetpack", "6.2.1+b38"),
                ("nvidia-l4t-core", "36.4.3-20250107174145"),
                ("python3-libnvinfer", "10.3.0.30-1+cuda12.5"),
            ),
        },
        library_answers={
            "libcuda.so.1": {"version": 12060},
            "libcudart.so.12": {"version": 12060},
            "libnvinfer.so.10": {
                "error": "libnvdla_compiler.so: cannot open shared object file: No such file or directory"
            },
        },
        packages={"cuda-bindings": "13.1.1"},
    )


def orin_nano_mended() -> RecordedMachine:
    """The same board after the doctor's advice was followed."""
    machine = orin_nano()
    machine.files["/home/user/dflash/pyvenv.cfg"] = "home = /usr/bin\ninclude-system-site-packages = true\n"
    machine.files["/proc/meminfo"] = meminfo(7_803_000, 5_900_000, 12_290_108)
    machine.files["/proc/swaps"] += "/swapfile file 8388604 0 -2\n"
    machine.library_answers["libnvinfer.so.10"] = {"version": 100300}
    machine.modules["tensorrt"] = "/usr/lib/python3.10/dist-packages/tensorrt"
    machine.packages |= {"tensorrt": "10.3.0", "cuda-bindings": "12.9.4", "onnx-ir": "1.1.0", "ml-dtypes": "0.5.4"}
    return machine


def thor(revision: str, tensorrt: str, cuda: str, driver: str) -> RecordedMachine:
    """A Jetson AGX Thor, ready.

    Args:
        revision: Of nv_tegra_release, after `# `.
        tensorrt: Version of python3-libnvinfer.
        cuda: `13.0`.
        driver: `580.00`.
    """
    major, minor = (int(part) for part in cuda.split("."))
    machine = RecordedMachine(
        arch="aarch64",
        python="3.12.3",
        files={
            "/etc/os-release": 'PRETTY_NAME="Ubuntu 24.04.3 LTS"\nNAME="Ubuntu"\n',
            "/etc/nv_tegra_release": f"# {revision}, BOARD: generic, EABI: aarch64, DATE: x\n# KERNEL_VARIANT: oot\n",
            "/proc/device-tree/model": "NVIDIA Jetson AGX Thor Developer Kit\0",
            "/proc/device-tree/compatible": "nvidia,p4071-0000+p3834-0008\0nvidia,p3834-0008\0nvidia,tegra264\0",
            "/home/user/dflash/pyvenv.cfg": "home = /usr/bin\ninclude-system-site-packages = true\n",
            "/usr/local/cuda/version.json": toolkit(f"{cuda}.0"),
            "/sys/class/devfreq/gpu-gpc-0/cur_freq": "1575000000\n",
            "/sys/class/devfreq/gpu-gpc-0/max_freq": "1575000000\n",
            "/proc/meminfo": meminfo(128_800_000, 120_000_000),
            "/proc/swaps": "Filename\tType\tSize\tUsed\tPriority\n",
        },
        commands={
            "nvidia-smi": printed(f"Driver Version: {driver}   CUDA Version: {cuda}\n"),
            "nvpmodel -q": printed("NV Power Mode: MAXN\n0\n"),
            "dpkg-query": dpkg(("libnvinfer10", tensorrt), ("python3-libnvinfer", tensorrt)),
        },
        modules={"tensorrt": "/usr/lib/python3.12/dist-packages/tensorrt"},
        library_answers={
            "libcuda.so.1": {"version": major * 1000 + minor * 10},
            "libnvinfer.so.10": {"version": 101303},
        },
        packages={
            "tensorrt": tensorrt.partition("-")[0],
            "cuda-bindings": f"{cuda}.1",
            "onnx-ir": "1.1.0",
            "ml-dtypes": "0.6.0",
        },
    )
    gpus(machine, f"NVIDIA Thor, 11.0, [N/A], {driver}, 1575, 1575, [N/A]\n")
    installed(machine, "onnxruntime", "1.32.0", "onnxruntime")
    return machine


def thor_7_0() -> RecordedMachine:
    return thor("R38 (release), REVISION: 2.0, GCID: 41844464", "10.13.3.9-1+cuda13.0", "13.0", "580.00")


def thor_7_2() -> RecordedMachine:
    return thor("R39 (release), REVISION: 2.0, GCID: 45755727", "10.16.2.10-1+cuda13.2", "13.2", "595.78")

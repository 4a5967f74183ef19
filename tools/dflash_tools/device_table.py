"""Boards and cards a pair may run on: memory, bandwidth, compute, and where each number comes from.

Compute is dense tensor-core throughput at the highest clock with accumulation in fp32, which is what half-precision
inference uses; halved where only the figure with structured sparsity is published. `memory_bytes` is what the system
can see, which on a board is less than what is soldered on it.
"""

from __future__ import annotations

import dataclasses

from dflash_runtime.errors import DFlashError

_MIB = 1 << 20
_GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Device:
    """One board or card."""

    name: str
    """What the user types."""
    label: str
    """What NVIDIA calls it."""
    unified: bool
    """CPU and GPU share one memory, so system, builder and page cache compete with the weights."""
    nominal_gb: int
    """Memory as sold."""
    memory_bytes: int
    """Memory the system sees: MemTotal on a unified device."""
    bandwidth_gb_per_s: float
    fp16_tflops: float
    """Dense, accumulating in fp32; bf16 is the same."""
    int8_tops: float
    """Dense. Reached only where activations are int8 too: weights alone in int8 compute in half precision."""
    sm: int
    """Compute capability without the point: 87 is 8.7."""
    sm_count: int
    clock_ghz: float
    source: str


_ORIN = "Jetson {} data sheet (half of its sparse INT8 TOPS; fp16 is half of int8); MemTotal by tegrastats, {}"
_THOR = (
    "Jetson Thor series data sheet: {} sparse FP4 TFLOPS; fp16 is an eighth; int8 taken as fp8, a quarter. MemTotal {}"
)
_GA10X = "NVIDIA Ampere GA102 whitepaper: 512 dense fp16 (fp32 accumulate) and 2048 int8 operations a clock and SM"
_ADA = "NVIDIA Ada whitepaper: 512 dense fp16 (fp32 accumulate) and 2048 int8 operations a clock and SM"
_BLACKWELL = "NVIDIA RTX Blackwell whitepaper: 512 dense fp16 (fp32 accumulate) and 2048 int8 operations a clock and SM"
_PRO = " (1024 fp16 on this professional card)"


def _unified(
    name: str, label: str, nominal_gb: int, visible_mib: int, gb_per_s: float,
    fp16: float, int8: float, sm: int, sm_count: int, clock_ghz: float, source: str,
) -> Device:
    return Device(
        name, label, True, nominal_gb, visible_mib * _MIB, gb_per_s, fp16, int8, sm, sm_count, clock_ghz, source
    )


def _card(
    name: str, label: str, nominal_gb: int, gb_per_s: float,
    fp16: float, int8: float, sm: int, sm_count: int, clock_ghz: float, source: str,
) -> Device:
    return Device(
        name, label, False, nominal_gb, nominal_gb * _GIB, gb_per_s, fp16, int8, sm, sm_count, clock_ghz, source
    )


_ROWS = (
    _unified("orin-nano-8gb", "Jetson Orin Nano 8GB (Super clocks)", 8, 7620, 102.4, 16.7, 33.4, 87, 8, 1.02,
             _ORIN.format("Orin Nano Super", "7620 MB")),
    _unified("orin-nx-8gb", "Jetson Orin NX 8GB", 8, 7620, 102.4, 12.5, 25.1, 87, 8, 0.765,
             _ORIN.format("Orin NX", "taken as that of Orin Nano")),
    _unified("orin-nx-16gb", "Jetson Orin NX 16GB", 16, 15656, 102.4, 15.0, 30.1, 87, 8, 0.918,
             _ORIN.format("Orin NX", "15656 MB")),
    _unified("agx-orin-32gb", "Jetson AGX Orin 32GB", 32, 30536, 204.8, 26.7, 53.3, 87, 14, 0.93,
             _ORIN.format("AGX Orin", "30536 MB")),
    _unified("agx-orin-64gb", "Jetson AGX Orin 64GB", 64, 62841, 204.8, 42.6, 85.2, 87, 16, 1.3,
             _ORIN.format("AGX Orin", "62841 MB")),
    _unified("thor-t4000-64gb", "Jetson T4000 64GB", 64, 61440, 273.0, 150.0, 300.0, 110, 12, 1.53,
             _THOR.format(1200, "taken as 60 GiB")),
    _unified("agx-thor-128gb", "Jetson AGX Thor 128GB (T5000)", 128, 125772, 273.0, 258.0, 516.0, 110, 20, 1.575,
             _THOR.format(2070, "125772 MB by tegrastats")),
    _unified("dgx-spark", "DGX Spark 128GB (GB10)", 128, 124610, 273.0, 125.0, 250.0, 121, 48, 2.54,
             "DGX Spark data sheet: 1000 sparse FP4 TFLOPS; fp16 is an eighth, int8 a quarter. MemTotal 127600748 kB"),
    _card("rtx-3060-12gb", "GeForce RTX 3060", 12, 360.0, 25.5, 101.9, 86, 28, 1.777, _GA10X),
    _card("rtx-3080-10gb", "GeForce RTX 3080", 10, 760.3, 59.5, 238.1, 86, 68, 1.71, _GA10X),
    _card("rtx-3090", "GeForce RTX 3090", 24, 936.2, 71.2, 284.7, 86, 82, 1.695, _GA10X),
    _card("rtx-a6000", "RTX A6000", 48, 768.0, 154.8, 309.7, 86, 84, 1.8, _GA10X + _PRO),
    _card("rtx-4060", "GeForce RTX 4060", 8, 272.0, 30.2, 120.9, 89, 24, 2.46, _ADA),
    _card("rtx-4060-ti-16gb", "GeForce RTX 4060 Ti", 16, 288.0, 44.1, 176.5, 89, 34, 2.535, _ADA),
    _card("rtx-4070", "GeForce RTX 4070", 12, 504.2, 58.3, 233.2, 89, 46, 2.475, _ADA),
    _card("rtx-4080", "GeForce RTX 4080", 16, 716.8, 97.5, 389.9, 89, 76, 2.505, _ADA),
    _card("rtx-4090", "GeForce RTX 4090", 24, 1008.0, 165.2, 660.6, 89, 128, 2.52, _ADA),
    _card("rtx-6000-ada", "RTX 6000 Ada Generation", 48, 960.0, 364.2, 728.5, 89, 142, 2.505, _ADA + _PRO),
    _card("rtx-5060-ti-16gb", "GeForce RTX 5060 Ti", 16, 448.0, 47.4, 189.6, 120, 36, 2.572, _BLACKWELL),
    _card("rtx-5070", "GeForce RTX 5070", 12, 672.0, 61.7, 246.9, 120, 48, 2.512, _BLACKWELL),
    _card("rtx-5070-ti", "GeForce RTX 5070 Ti", 16, 896.0, 87.9, 351.5, 120, 70, 2.452, _BLACKWELL),
    _card("rtx-5080", "GeForce RTX 5080", 16, 960.0, 112.6, 450.2, 120, 84, 2.617, _BLACKWELL),
    _card("rtx-5090", "GeForce RTX 5090", 32, 1792.0, 209.5, 838.0, 120, 170, 2.407, _BLACKWELL),
    _card("rtx-pro-6000", "RTX PRO 6000 Blackwell Workstation Edition", 96, 1792.0, 503.8, 1007.6, 120, 188, 2.617,
          _BLACKWELL + _PRO),
    _card("h200", "H200", 141, 4800.0, 989.4, 1978.9, 90, 132, 1.83,
          "NVIDIA H200 data sheet (half of its sparse figures)"),
)  # fmt: skip

DEVICES: dict[str, Device] = {device.name: device for device in _ROWS}


def find_device(name: str) -> Device:
    """The row of a device, by what the user types.

    Raises:
        DFlashError: no such row; all names are given.
    """
    device = DEVICES.get(name.lower())
    if device is None:
        raise DFlashError(f"{name!r} is no device of the table. Give auto, or one of: {', '.join(DEVICES)}.")
    return device


def devices_named(text: str) -> list[Device]:
    """Rows that a driver's or a device tree's name may mean; boards of one name differ in memory only.

    Args:
        text: Such as `NVIDIA GeForce RTX 4090`, `NVIDIA GB10` or `NVIDIA Jetson Orin NX Engineering Reference`.
    """
    words = text.removeprefix("NVIDIA ").strip().lower()
    exact = [device for device in DEVICES.values() if device.label.lower() == words]
    if exact:
        return exact
    known = {"jetson t4000": "thor-t4000", "jetson orin nano": "orin-nano", "jetson orin nx": "orin-nx",
             "jetson agx orin": "agx-orin", "jetson agx thor": "agx-thor", "gb10": "dgx-spark"}  # fmt: skip
    return [d for start, name in known.items() if words.startswith(start) for d in DEVICES.values()
            if d.name.startswith(name)]  # fmt: skip

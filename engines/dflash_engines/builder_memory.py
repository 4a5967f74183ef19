"""What a TensorRT builder takes, told before it starts: on a board it shares the memory with everything else.

Fitted to builds with TensorRT-RTX 1.7.1 on a machine without a GPU: `python -m dflash_tools.engine_memory` holds
0.62 GB for the five profiles of Qwen2-7B's 28 layers; `dflash-export engines --weights embedded` says it for others.
int4 weights, which engines hold, count too: for the 3.65 GB of that model with two profiles 14.2 GB are resident, of it
3.65 GB the mapped file of weights, which the system may drop. On a GPU, kernels are tried on device memory too, which
on a board comes on top.
"""

from __future__ import annotations

from pathlib import Path

from dflash_runtime.errors import EngineError

BASE_BYTES = 430_000_000
BYTES_PER_LAYER_AND_PROFILE = 1_400_000
COPIES_OF_EMBEDDED_WEIGHTS = 3.3
COPIES_OF_INT4_WEIGHTS = 2.8
"""Without the mapped file."""


def builder_peak_bytes(
    num_layers: int, num_profiles: int, embedded_weight_bytes: int = 0, int4_weight_bytes: int = 0
) -> int:
    """About the most memory one build takes; the mapped file of int4 weights comes on top where there is room."""
    weights = int(COPIES_OF_EMBEDDED_WEIGHTS * embedded_weight_bytes + COPIES_OF_INT4_WEIGHTS * int4_weight_bytes)
    return BASE_BYTES + BYTES_PER_LAYER_AND_PROFILE * num_layers * num_profiles + weights


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Memory and swap that are free to be taken; None where the system does not say."""
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    fields = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines) if rest}
    if "MemAvailable" not in fields:
        return None
    return fields["MemAvailable"] + fields.get("SwapFree", 0)


def check_memory(kind: str, needed_bytes: int, free_bytes: int | None, *, holds_int4: bool = False) -> None:
    """Refuses a build that would end in the system killing it.

    Args:
        kind: Which engine, for the message.
        needed_bytes: From `builder_peak_bytes`.
        free_bytes: From `available_bytes`.
        holds_int4: The engine holds int4 weights, which no option changes.

    Raises:
        EngineError: less is free than the build takes.
    """
    if free_bytes is not None and free_bytes < needed_bytes:
        smaller = "quantise to int8, which engines are given" if holds_int4 else "use --weights shared"
        raise EngineError(
            f"Building the {kind} engine takes about {needed_bytes >> 20} MiB and {free_bytes >> 20} MiB of memory and "
            f"swap are free. Close other programs, add swap, give fewer block sizes, or {smaller}."
        )

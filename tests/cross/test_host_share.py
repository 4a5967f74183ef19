"""What Python does between the calls of a device: few steps in any cycle, and under 3 % of a real one."""

from __future__ import annotations

import itertools
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import host_share
import pytest
from conftest import Make
from host_share import TimedDevice, cycles_of, measure_share, open_timed
from pairs import MAIN, Pair
from recorded_engines import BACKENDS

from dflash_runtime.bundle import Bundle
from dflash_runtime.device_backend import DeviceBackend
from dflash_runtime.device_numbers import DeviceNumbers

MOST_CALLS = {"fused": 50, "primitive": 200}
"""Of Python and of C functions for one cycle. Captured, it is enqueued by a launch and read; in the primitive form
four graphs and their copies are enqueued one by one."""
SMOLLM2 = Pair(
    "smollm2-shape",
    kind="llama",
    target={
        "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49_152, "tie_word_embeddings": True,
    },
    drafter={
        "layers": 2, "taps": (1, 15, 28), "block_size": 8, "intermediate_size": 1536, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "mask_token_id": 511,
    },
    max_context_tokens=160,
)  # fmt: skip
"""The sizes of SmolLM2-135M, with random weights."""


@pytest.fixture
def bundle(exported: Make, tmp_path: Path) -> Bundle:
    return Bundle.open(shutil.copytree(exported(MAIN), tmp_path / "bundle"))


def host_calls(backend: DeviceBackend, device: TimedDevice, block_size: int) -> float:
    """Python and C functions called per cycle, the device's own apart."""
    for _ in cycles_of(backend, block_size, 30):
        pass
    rounds, calls = cycles_of(backend, block_size), Counter[str]()

    def count(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call") and not device.depth and frame.f_code.co_filename != host_share.__file__:
            calls[frame.f_code.co_name if event == "call" else argument.__name__] += 1

    next(rounds)
    sys.setprofile(count)
    try:
        for _ in itertools.islice(rounds, 10):
            pass
    finally:
        sys.setprofile(None)
    return (calls.total() - calls["setprofile"]) / 10


@pytest.mark.parametrize("block_size", [1, 8])
@pytest.mark.parametrize("form", BACKENDS)
def test_a_cycle_is_few_calls(bundle: Bundle, form: str, block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, device = open_timed(bundle, form, [8])
    opened = len(device.log)
    assert MOST_CALLS[form] / 3 < host_calls(backend, device, block_size) < MOST_CALLS[form]
    assert {entry[0] for entry in device.log[opened:]}.isdisjoint({"allocate", "host"})
    busy_host(monkeypatch, lambda: [abs(number) for number in range(200)])
    assert host_calls(backend, device, block_size) > MOST_CALLS[form]


def busy_host(patch: pytest.MonkeyPatch, work: Callable[[], object]) -> None:
    """A planted fault: whenever the host reads what a cycle found, it does something else first."""
    read = DeviceNumbers.read

    def slow(self: DeviceNumbers, place: int = 0) -> Any:
        work()
        return read(self, place)

    patch.setattr(DeviceNumbers, "read", slow)


@pytest.mark.slow
@pytest.mark.parametrize("form", BACKENDS)
def test_the_host_takes_under_3_percent_of_a_cycle(
    form: str, exported: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By processor time, on one thread; a cycle of block 8, and a plain step, where the device has least to do."""
    bundle = Bundle.open(shutil.copytree(exported(SMOLLM2), tmp_path / "bundle"))
    backend, device = open_timed(bundle, form, [8])
    shares = {size: measure_share(backend, device, size, new_tokens=24) for size in (8, 1)}
    assert all(0 < share.percent < 3 for share in shares.values()), shares
    wasted_s = 0.05 * shares[1].cycle_s

    def waste() -> None:
        end = time.thread_time() + wasted_s
        while time.thread_time() < end:
            pass

    busy_host(monkeypatch, waste)
    assert measure_share(backend, device, 1, new_tokens=24).percent > 3

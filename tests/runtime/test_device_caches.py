"""Caches on the device: layouts that grow, and commits that reach the right rows and no others."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from recording_device import RecordingDevice

from dflash_runtime.bundle import StateTensor
from dflash_runtime.device_caches import DeviceCaches
from dflash_runtime.errors import EngineError

LAYOUTS = (16, 32, 75)


def state(*shapes: tuple[int, int], kind: str = "kv") -> list[StateTensor]:
    return [
        StateTensor(f"past_key_values.{i}", f"present.{i}", kind, ["B", heads, "T", size], None, "length")
        for i, (heads, size) in enumerate(shapes)
    ]


def rows_of(device: RecordingDevice, caches: DeviceCaches, tensors: list[StateTensor], count: int) -> list[Any]:
    """The first `count` rows of every cache, [heads, count, D]."""
    device.finish()
    buffers, found = caches.tensors(caches.layout_rows), []
    for tensor in tensors:
        array = device.view(*buffers[tensor.input]).view(np.float32)
        found.append(array.reshape(tensor.shape[1], caches.layout_rows, tensor.shape[3])[:, :count].copy())
        assert buffers[tensor.output] == buffers[tensor.input]
        assert buffers[tensor.input].address % 256 == 0
    return found


@pytest.mark.parametrize(
    "shapes", [[(2, 16)] * 4, [(1, 4)] * 3, [(3, 4), (3, 8), (3, 4), (3, 8)], [(1, 1)], [(5, 7)] * 2]
)
@pytest.mark.parametrize("seed", range(8))
def test_committed_rows_stay_whatever_the_layout(shapes: list[tuple[int, int]], seed: int) -> None:
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    device, tensors = RecordingDevice(), state(*shapes)
    caches = DeviceCaches(device, tensors, 4, LAYOUTS)
    expected = [np.zeros((heads, 0, size), np.float32) for heads, size in shapes]
    position = requests = 0
    while position < 60:
        if requests < 6 and rng.random() < 0.3:  # the next request begins like this one
            requests, position = requests + 1, rng.randrange(position + 1)
            caches.reset(position, clear=False)
            assert caches.layout_rows == next(n for n in LAYOUTS if n >= position)
            expected = [a[:, :position] for a in expected]
            for found, known in zip(rows_of(device, caches, tensors, position), expected, strict=True):
                np.testing.assert_array_equal(found, known)
        rows = rng.choice([1, 4, 9])
        padded = rows + rng.choice([0, 3])
        new = [numbers.standard_normal((heads, padded, size)).astype(np.float32) for heads, size in shapes]
        before = caches.layout_rows
        caches.make_room(position + rows, position)
        assert caches.layout_rows == max(before, next(n for n in LAYOUTS if n >= position + rows))
        sources = []
        for group in caches.groups:
            members = np.stack([new[int(tensor.input.rpartition(".")[2])] for tensor in group.members])
            buffer = device.allocate(members.nbytes)
            device.view(*buffer)[:] = members.view(np.uint8).reshape(-1)
            sources.append(buffer.address)
        caches.commit(sources, padded, rows, position)
        position += rows
        expected = [np.concatenate([a, b[:, :rows]], 1) for a, b in zip(expected, new, strict=True)]
        kept = rng.randrange(position - rows + 1, position + 1)  # a part is rejected
        expected, position = [a[:, :kept] for a in expected], kept
        for found, known in zip(rows_of(device, caches, tensors, position), expected, strict=True):
            np.testing.assert_array_equal(found, known)
    device.check_guards()
    caches.reset(clear=False)
    assert caches.layout_rows == LAYOUTS[0]


@pytest.mark.parametrize(
    ("shapes", "copies"),
    [([(2, 32)] * 4, 1), ([(2, 32), (2, 64)] * 2, 2), ([(1, 1)] * 3, 3)],  # 76 rows of 4 bytes are no multiple of 256
)
def test_a_commit_is_one_copy_where_caches_lie_behind_one_another(shapes: list[tuple[int, int]], copies: int) -> None:
    device = RecordingDevice()
    caches = DeviceCaches(device, state(*shapes), 4, (76,))
    sources = [device.allocate(8192).address for _ in caches.groups]
    caches.commit(sources, 4, 3, 70)
    assert len([entry for entry in device.log if entry[0] == "copy"]) == copies


def test_clearing_wipes_everything() -> None:
    device, tensors = RecordingDevice(), state((2, 16), (1, 8))
    caches = DeviceCaches(device, tensors, 4, (32,))
    for buffer in caches.tensors(32).values():
        device.view(*buffer)[:] = 255
    caches.reset(clear=False)
    assert all(np.isnan(rows).all() for rows in rows_of(device, caches, tensors, 32))
    caches.reset(clear=True)
    assert not any(rows.any() for rows in rows_of(device, caches, tensors, 32))


def test_other_state_is_refused() -> None:
    with pytest.raises(EngineError, match=r"past_key_values.0 is 'recurrent'"):
        DeviceCaches(RecordingDevice(), state((2, 4), kind="recurrent"), 4, (32,))

"""The small integers of a device backend: what a call is told and what it found, one copy each way."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from dflash_runtime.device import Array, Buffer, Device, aligned
from dflash_runtime.device_engine import STOP_ID_SLOTS
from dflash_runtime.errors import PromptError

_INT_BYTES = 8
_SAID = ("position", "input_ids", "draft_input", "logit_rows", "stop_ids", "limit", "temperature", "first_row")
_FOUND = ("new_position", "anchor", "committed", "count", "token_ids", "draft_ids", "done")
PLACES = 2
"""To read into, each with its mark: one cycle runs while the one before it is read."""


class DeviceNumbers:
    """One row of INT64 for each name, on the device; `position` and the anchor, first of `input_ids`, live there.

    Args:
        device: Where they lie.
        rows: Most tokens in a call.
        mask_token_id: Fills what the drafter is given behind the anchor.
    """

    def __init__(self, device: Device, rows: int, mask_token_id: int) -> None:
        self._device, self._width = device, aligned(max(rows, STOP_ID_SLOTS) * _INT_BYTES)
        self._said = device.host_memory(len(_SAID) * self._width)
        self.said = dict(zip(_SAID, self._said.view(np.int64).reshape(len(_SAID), -1), strict=True))
        self.said["draft_input"][:] = mask_token_id
        self._places = [device.host_memory(len(_FOUND) * self._width) for _ in range(PLACES)]
        self._found = [dict(zip(_FOUND, place.view(np.int64).reshape(len(_FOUND), -1), strict=True))
                       for place in self._places]  # fmt: skip
        self.buffers: dict[str, Buffer] = {}
        for names in (_SAID, _FOUND, ("rows",), ("sizes",)):
            memory = device.allocate(len(names) * self._width)
            for i, name in enumerate(names):
                self.buffers[name] = Buffer(memory.address + i * self._width, self._width)
        sizes = device.host_memory(self._width)
        sizes.view(np.int64)[:] = range(self._width // _INT_BYTES)
        device.upload(self.buffers["sizes"].address, sizes)

    def say(self, ids: Sequence[int], position: int, logit_rows: Sequence[int]) -> None:
        """Tells the next call. Padded rows get any token; a drafter the first token and masks."""
        said = self.said
        said["position"][0], said["draft_input"][0] = position, ids[0]
        said["input_ids"][: len(ids)], said["input_ids"][len(ids) :] = ids, 0
        said["logit_rows"][:] = logit_rows[0]
        said["logit_rows"][: len(logit_rows)] = logit_rows
        self._device.upload(self.buffers["position"].address, self._said)

    def begin(self, anchor: int, position: int, limit: int, stop_ids: Collection[int]) -> None:
        """Tells what cycles need; after it they need the host no more.

        Raises:
            PromptError: more stop ids than the engines compare with.
        """
        if len(stop_ids) > STOP_ID_SLOTS:
            raise PromptError(f"{len(stop_ids)} stop ids are given, and engines take {STOP_ID_SLOTS}. Give fewer.")
        self.said["limit"][0], self.said["stop_ids"][:] = limit, -2
        self.said["stop_ids"][: len(stop_ids)] = list(stop_ids)
        self.say([max(anchor, 0)], position, range(len(self.said["logit_rows"])))

    def say_one(self, name: str, number: np.float32 | np.int64) -> None:
        """Tells one number, in its own type."""
        self.said[name].view(number.dtype)[0] = number
        self._device.upload(self.buffers[name].address, self.said[name])

    def copy(self, to: str, source: str, index: int = 0, *, to_index: int = 0, count: int = 1) -> None:
        """Enqueues a copy of numbers that lie on the device; `sizes` is a table of 0, 1, 2, ..."""
        start, end = self.buffers[source].address + index * _INT_BYTES, self.buffers[to].address + to_index * _INT_BYTES
        self._device.copy_rows(end, count * _INT_BYTES, start, count * _INT_BYTES, count * _INT_BYTES, 1)

    def advance(self) -> None:
        """What acceptance found is where the next cycle begins: position and anchor."""
        there, found, width = self.buffers["position"].address, self.buffers["new_position"].address, self._width
        self._device.copy_rows(there, width, found, width, _INT_BYTES, 2)

    def download(self, place: int = 0) -> None:
        """Enqueues reading what was found, for `read`."""
        self._device.download(self._places[place], self.buffers[_FOUND[0]].address)
        self._device.mark(place)

    def read(self, place: int = 0) -> dict[str, Array]:
        """Waits for what was found."""
        self._device.wait(place)
        return self._found[place]

    def wait(self) -> None:
        """Waits for everything that is enqueued: what is said may change then."""
        self._device.mark()
        self._device.wait()

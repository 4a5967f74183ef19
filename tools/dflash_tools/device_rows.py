"""KV rows copied from a device to the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflash_runtime.bundle import StateTensor
from dflash_runtime.device import Device
from dflash_runtime.device_caches import DeviceCaches
from dflash_runtime.weights import STORED, widened
from dflash_tools.reference_tensors import Array, Tensors

_DTYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}


class DeviceRows:
    """Reads rows of caches, head by head; slow, and only while nothing is enqueued that writes them."""

    def __init__(self, device: Device, precision: str) -> None:
        self._device, self._dtype = device, _DTYPES[precision]
        self._staging: Array = np.zeros(0, np.uint8)

    def read_all(self, caches: Sequence[DeviceCaches], state: Sequence[StateTensor], first_row: int, start: int,
                 end: int) -> Tensors:
        """Rows `start` to `end` of every cache of a model, in fp32.

        Args:
            caches: Those as long as the context, and for a drafter its rings.
            state: The model's state tensors.
            first_row: The row in the first slot of rings.
            start: First row; of a ring at least `first_row`.
            end: One past the last.

        Returns:
            Output name -> [rows, heads * D], in the order of the state.
        """
        found: Tensors = {}
        for some, before in zip(caches, (0, first_row), strict=False):
            own = [tensor for tensor in state if tensor.input in some.tensors(some.layout_rows)]
            found |= self.read(some, own, some.layout_rows, start - before, end - before)
        return {tensor.output: found[tensor.output] for tensor in state}

    def read(self, caches: DeviceCaches, state: Sequence[StateTensor], layout_rows: int, start: int, end: int
             ) -> Tensors:
        """Slots `start` to `end` of caches laid out alike, in fp32.

        Args:
            caches: Where they lie.
            state: Which of them.
            layout_rows: Rows the caches are laid out with.
            start: First slot.
            end: One past the last.

        Returns:
            Output name -> [rows, heads * D].
        """
        places, found = caches.tensors(layout_rows), {}
        for tensor in state:
            _, heads, _, size = tensor.cache_shape(layout_rows)
            row_bytes = size * np.dtype(STORED[self._dtype]).itemsize
            first = places[tensor.output].address + start * row_bytes
            pieces = [
                self._download(first + head * layout_rows * row_bytes, (end - start) * size).reshape(end - start, size)
                for head in range(heads)
            ]
            found[tensor.output] = np.concatenate(pieces, axis=-1)
        return found

    def _download(self, address: int, count: int) -> Array:
        stored = np.dtype(STORED[self._dtype])
        size = count * stored.itemsize
        if size > len(self._staging):
            self._staging = self._device.host_memory(size)
        piece = self._staging[:size]
        if count:
            self._device.download(piece, address)
            self._device.mark()
            self._device.wait()
        return widened(piece.view(stored).copy(), self._dtype)

"""KV caches on the device: allocated once, updated in place by the fused form, committed to by copies in the other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from dflash_runtime.bundle import StateTensor
from dflash_runtime.device import Buffer, Device, aligned


class DeviceCaches:
    """The caches of one model, [1, kv_heads, rows, D] each, those of one shape behind one another.

    Args:
        device: Where they lie.
        state: The model's state tensors, in the order of its layers.
        item_bytes: Size of one number.
        layouts: Rows a cache may be laid out with, ascending. The primitive form reads caches of fewer rows while the
            context is short; rows of a head then lie closer to each other.
    """

    def __init__(self, device: Device, state: Sequence[StateTensor], item_bytes: int, layouts: Sequence[int]) -> None:
        self._device, self._layouts, capacity_rows = device, layouts, layouts[-1]
        groups: dict[tuple[int, int], list[StateTensor]] = {}
        for tensor in state:
            _, heads, _, size = tensor.cache_shape(capacity_rows)
            groups.setdefault((heads, size), []).append(tensor)
        self.groups = [
            _Group(members, heads, size * item_bytes, device.allocate(
                len(members) * aligned(heads * capacity_rows * size * item_bytes)))
            for (heads, size), members in groups.items()
        ]  # fmt: skip
        self.layout_rows = layouts[0]

    def tensors(self, layout_rows: int) -> dict[str, Buffer]:
        """Past and present of every cache in a layout: the same memory."""
        return {
            name: Buffer(group.address(index, 0, layout_rows), group.heads * layout_rows * group.row_bytes)
            for group in self.groups
            for index, tensor in enumerate(group.members)
            for name in (tensor.input, tensor.output)
        }

    def reset(self, kept_rows: int = 0, *, clear: bool) -> None:
        """Rows behind the kept ones are dead; `clear` wipes all, as a NaN gets through a mask (0 x NaN).

        The layout becomes the smallest that holds the kept rows, or a short request would pay for a long one before.
        """
        self._move(self._layouts[0], kept_rows, kept_rows)
        for group in self.groups if clear else ():
            self._device.clear(group.memory)

    def make_room(self, rows: int, committed_rows: int) -> None:
        """Changes to the smallest layout of at least `rows`, if it is larger; the committed rows move along."""
        self._move(self.layout_rows, rows, committed_rows)

    def _move(self, least: int, rows: int, committed_rows: int) -> None:
        wanted = next((size for size in self._layouts if size >= max(least, rows)), self._layouts[-1])
        # Growing from the last piece to the first, shrinking from the first: a layout has at least twice the rows of
        # the one before, so that no piece lands on itself or on one that has not moved yet.
        step = -1 if wanted > self.layout_rows else 1
        for group in self.groups if committed_rows and wanted != self.layout_rows else ():
            for index, head in list(itertools.product(range(len(group.members)), range(group.heads)))[::step]:
                old, new = (group.address(index, head, size) for size in (self.layout_rows, wanted))
                if old != new:
                    size = committed_rows * group.row_bytes
                    self._device.copy_rows(new, size, old, size, size, 1)
        self.layout_rows = wanted

    def slide(self, moved: int, rows: int) -> None:
        """Moves `rows` rows to the front, from `moved` slots behind it."""
        for group in self.groups:
            pitch, size = self.layout_rows * group.row_bytes, rows * group.row_bytes
            for index in range(len(group.members)):
                front = group.address(index, 0, self.layout_rows)
                self._device.copy_rows(front, pitch, front + moved * group.row_bytes, pitch, size, group.heads)

    def commit(self, new_rows: Iterator[int], call_rows: int, rows: int, slot: int) -> None:
        """Copies the first `rows` of the `call_rows` rows a call handed back, group by group, to `slot`."""
        for group, source in zip(self.groups, new_rows, strict=False):  # the rest is for other caches
            pitch, source_pitch = self.layout_rows * group.row_bytes, call_rows * group.row_bytes
            gapless = group.stride(self.layout_rows) == group.heads * pitch
            for index in range(1 if gapless else len(group.members)):
                self._device.copy_rows(
                    group.address(index, 0, self.layout_rows) + slot * group.row_bytes, pitch,
                    source + index * group.heads * source_pitch, source_pitch,
                    rows * group.row_bytes, group.heads * (len(group.members) if gapless else 1),
                )  # fmt: skip


class _Group:
    """Caches of one shape."""

    def __init__(self, members: list[StateTensor], heads: int, row_bytes: int, memory: Buffer) -> None:
        self.members, self.heads, self.row_bytes, self.memory = members, heads, row_bytes, memory

    def stride(self, layout_rows: int) -> int:
        return aligned(self.heads * layout_rows * self.row_bytes)

    def address(self, index: int, head: int, layout_rows: int) -> int:
        return self.memory.address + index * self.stride(layout_rows) + head * layout_rows * self.row_bytes

"""A queue in which clients take turns: one that asks for much waits for itself, not the others for it."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """First in, first out within a client; round robin over clients. Not safe across threads by itself."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[Item]] = OrderedDict()  # the client whose turn it is comes first

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def push(self, client: str, item: Item) -> None:
        """Puts an item behind the client's others; a client that has none joins behind the clients who have."""
        self._lines.setdefault(client, deque()).append(item)

    def pop(self) -> Item | None:
        """The next item, after which it is the next client's turn; None where there is none."""
        if not self._lines:
            return None
        client, line = next(iter(self._lines.items()))
        item = line.popleft()
        self._lines.move_to_end(client)
        if not line:
            del self._lines[client]
        return item

    def remove(self, client: str, item: Item) -> bool:
        """Takes an item out; whether it was still there."""
        line = self._lines.get(client)
        if line is None or item not in line:
            return False
        line.remove(item)
        if not line:
            del self._lines[client]
        return True

    def items(self) -> list[Item]:
        """All that wait, by client."""
        return [item for line in self._lines.values() for item in line]

"""How many proposals a drafter gets right at every place of a text, for each block size: recorded once, played often.

Greedy proposals depend on the text before them alone, so whatever block sizes an answer was decoded with, what any
other choice of sizes would have committed can be told from the record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dflash_runtime.adaptive import BlockSizeController
from dflash_runtime.backend import Backend
from dflash_tools.position_acceptance import DraftedRound

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclasses.dataclass(frozen=True)
class RecordedText:
    """One answer of the target."""

    name: str
    num_tokens: int
    """Places where a round can begin; one less than the answer has, as the prefill gives the first."""
    right: dict[int, list[int]]
    """Block size -> for a round that begins at each place, how many proposals are what the target says."""

    def to_json(self) -> dict[str, Any]:
        """One digit a place, so that a record stays readable."""
        return {"name": self.name, "right": {str(b): "".join(_DIGITS[n] for n in row) for b, row in self.right.items()}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RecordedText:
        """What `to_json` gave."""
        right = {int(size): [_DIGITS.index(digit) for digit in row] for size, row in data["right"].items()}
        return cls(data["name"], len(next(iter(right.values()))), right)


def record_text(
    backend: Backend, name: str, prompt_ids: Sequence[int], token_ids: Sequence[int], block_sizes: Sequence[int],
    progress: Callable[[str, int, int], None],
) -> RecordedText:  # fmt: skip
    """Drafts at every place of an answer with every block size.

    Args:
        backend: With a drafter; its state is replaced.
        name: Of the text.
        prompt_ids: What the answer follows.
        token_ids: The target's own greedy answer.
        block_sizes: Each at least 2, anchor included.
        progress: Called with a stage and how much of it is done.
    """
    position = backend.reset()
    for start in range(0, len(prompt_ids), backend.prefill_chunk_tokens):
        chunk = prompt_ids[start : start + backend.prefill_chunk_tokens]
        backend.prefill(chunk, start)
        backend.append_context(len(chunk), start)
        position += len(chunk)
    right: dict[int, list[int]] = {size: [] for size in block_sizes}
    for place, anchor in enumerate(token_ids[:-1]):
        progress(f"recording {name}", place, len(token_ids) - 1)
        for size, counts in right.items():
            said = list(token_ids[place + 1 : place + size])
            counts.append(DraftedRound(backend.draft(anchor, size, position), said).accepted)
        backend.verify([anchor], position)
        backend.append_context(1, position)
        position += 1
    return RecordedText(name, len(token_ids) - 1, right)


def join_texts(texts: Sequence[RecordedText], name: str, part_tokens: int) -> RecordedText:
    """A text that changes its kind: parts of the others in turn, as long as each has a next part."""
    sizes = texts[0].right
    rounds = min(text.num_tokens for text in texts) // part_tokens
    right: dict[int, list[int]] = {size: [] for size in sizes}
    for start in range(0, rounds * part_tokens, part_tokens):
        for text in texts:
            for size, counts in right.items():
                counts.extend(text.right[size][start : start + part_tokens])
    return RecordedText(name, rounds * part_tokens * len(texts), right)


def play(text: RecordedText, round_ms: Mapping[int, float], choose: Callable[[], int],
         controller: BlockSizeController | None = None) -> tuple[float, list[int]]:  # fmt: skip
    """Milliseconds and block sizes of an answer; a controller is told of every round."""
    place, ms, sizes = 0, 0.0, []
    while place < text.num_tokens:
        size = choose()
        right = text.right[size][place] if size > 1 else 0
        committed = min(right + 1, text.num_tokens - place)
        ms += round_ms[size]
        if controller is not None:
            # At the very end proposals have nothing to agree with.
            complete = place + size <= text.num_tokens
            controller.observe(size, committed, round_ms[size], complete=complete)
        sizes.append(size)
        place += committed
    return ms, sizes


def compare_choices(
    texts: Sequence[RecordedText], round_ms: Mapping[int, float], *, informed: bool = True
) -> tuple[float, dict[int, float]]:
    """Milliseconds of all texts one after the other: chosen by a controller, and with each fixed size.

    Args:
        texts: In their order.
        round_ms: Block size -> milliseconds of a round; 1 is a plain step.
        informed: The controller knows the times beforehand, as after `tune`.
    """
    controller = BlockSizeController([size for size in round_ms if size > 1], round_ms if informed else None)
    own, fixed = 0.0, dict.fromkeys(round_ms, 0.0)
    for text in texts:
        controller.begin()
        own += play(text, round_ms, controller.choose, controller)[0]
        for size in fixed:
            fixed[size] += play(text, round_ms, lambda size=size: size)[0]  # type: ignore[misc]
    return own, fixed

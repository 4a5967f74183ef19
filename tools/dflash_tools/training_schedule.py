"""Order of texts and learning rates over a training, as functions of the step alone: a resumed run needs no history."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dflash_tools.training_blocks import seeded_generator


def learning_rate(step: int, num_steps: int, peak: float, warmup_share: float) -> float:
    """Linear warm-up to the peak, then half a cosine down to 0.

    Args:
        step: Steps already done.
        num_steps: Of the whole training.
        peak: Highest rate.
        warmup_share: Of all steps, at least one step.
    """
    warmup = max(1, round(num_steps * warmup_share))
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, num_steps - warmup)))


class TextOrder:
    """Every text once an epoch, in a new order each time.

    Attributes:
        steps_per_epoch: Batches of an epoch; the last one may be smaller.
    """

    def __init__(self, numbers: Sequence[int], batch_size: int, seed: int) -> None:
        self._numbers = list(numbers)
        self._batch_size = batch_size
        self._seed = seed
        self.steps_per_epoch = math.ceil(len(self._numbers) / batch_size)

    def epoch(self, step: int) -> int:
        """The epoch a step belongs to, from 0."""
        return step // self.steps_per_epoch

    def batch(self, step: int) -> list[int]:
        """Numbers of the texts of a step."""
        generator = seeded_generator(self._seed, self.epoch(step))
        order = torch.randperm(len(self._numbers), generator=generator)
        start = step % self.steps_per_epoch * self._batch_size
        return [self._numbers[i] for i in order[start : start + self._batch_size].tolist()]

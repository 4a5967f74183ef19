"""The rows of the output head that a training step reads: all, or those of the answers' tokens and a few others.

A small drafter's step costs as much in the head as in the drafter itself, and answers use a small part of a large
vocabulary. The tokens they never use are stood for by some drawn at random, so that their sum in the softmax is right
on average: a drafter learns not to propose them.

Source: importance sampling of the partition function, Bengio and Senecal 2003, with a uniform proposal.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection

import torch
from torch import Tensor

from dflash_tools.training_blocks import seeded_generator


@dataclasses.dataclass(frozen=True)
class HeadRows:
    """Rows of a head; labels are places among them."""

    matrix: Tensor
    """[R, H]"""
    places: Tensor | None = None
    """[V] place of each token's row, 0 for those left out; None where every token has its row."""
    num_drawn: int = 0
    """How many of the last rows stand for others too."""
    drawn_log_weight: float = 0.0
    """Added to the logits of those: log of the tokens that each of them stands for."""

    def of(self, token_ids: Tensor) -> Tensor:
        """Places of tokens that have a row."""
        return token_ids if self.places is None else self.places[token_ids]


class HeadSample:
    """Draws the rows of each step."""

    def __init__(self, head: Tensor, used: Collection[int], num_others: int, seed: int) -> None:
        """Sorts the vocabulary.

        Args:
            head: [V, H]
            used: Tokens that can be a label; they have a row in every step.
            num_others: Rows drawn from the rest of the vocabulary.
            seed: Of the draws.
        """
        self._head, self._seed = head, seed
        is_used = torch.zeros(len(head), dtype=torch.bool)
        is_used[torch.tensor(sorted(used))] = True
        self._used, self._rest = is_used.nonzero()[:, 0], (~is_used).nonzero()[:, 0]
        self._count = min(num_others, len(self._rest))
        self._log_weight = math.log(len(self._rest) / self._count) if self._count else 0.0

    def rows(self, step: int) -> HeadRows:
        """The rows of a step, the same whenever they are asked for."""
        generator = seeded_generator(self._seed, step)
        drawn = self._rest[torch.randperm(len(self._rest), generator=generator)[: self._count]]
        ids = torch.cat((self._used, drawn)).to(self._head.device)
        places = torch.zeros(len(self._head), dtype=torch.long, device=self._head.device)
        places[ids] = torch.arange(len(ids), device=self._head.device)
        return HeadRows(self._head[ids], places, self._count, self._log_weight)

"""How the next token is chosen, as a request asks for it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from dflash_runtime.errors import PromptError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen. The defaults are greedy decoding."""

    temperature: float = 0.0
    """0 takes the likeliest token; 1 samples the target's own distribution."""
    top_k: int = 0
    """Keep the k likeliest tokens and those equal to the last of them; 0 keeps all."""
    top_p: float = 1.0
    """Keep the fewest likeliest tokens that have this much probability together."""
    min_p: float = 0.0
    """Keep tokens at least this times as likely as the likeliest."""
    repetition_penalty: float = 1.0
    """Divides the positive scores of tokens in prompt and answer, multiplies the negative ones."""
    presence_penalty: float = 0.0
    """Taken once from the score of every token in the answer."""
    frequency_penalty: float = 0.0
    """Taken from the score of a token for each time it is in the answer."""
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """Token id -> what is added to its score."""
    seed: int | None = None
    """Equal seeds give equal texts; None draws one."""

    def check_sampling(self, vocab_size: int) -> None:
        """Raises PromptError for the first option that makes no sense."""
        limits: dict[str, tuple[float, float]] = {
            "temperature": (0, math.inf), "top_p": (1e-9, 1), "min_p": (0, 1), "repetition_penalty": (1e-9, math.inf),
            "presence_penalty": (-math.inf, math.inf), "frequency_penalty": (-math.inf, math.inf),
        }  # fmt: skip
        for name, (low, high) in limits.items():
            value: Any = getattr(self, name)
            if not isinstance(value, (int, float)) or not math.isfinite(value) or not low <= value <= high:
                raise PromptError(f"{name} is {value!r} and must be a number from {low:g} to {high:g}.")
        for name in ("top_k", "seed"):
            value = getattr(self, name) or 0
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
                raise PromptError(f"{name} is {value!r} and must be a whole number from 0 on.")
        for token, bias in self.logit_bias.items():
            if not 0 <= token < vocab_size or math.isnan(bias):
                raise PromptError(f"logit_bias has {token}: {bias}; ids go from 0 to {vocab_size - 1}.")

    @property
    def needs_logits(self) -> bool:
        """Whether the graph's own argmax is not enough."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1)
        return self.temperature > 0 or any(penalties) or bool(self.logit_bias)

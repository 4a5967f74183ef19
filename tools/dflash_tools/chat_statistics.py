"""What a chat has cost so far, for `/stats`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dflash_runtime.backend import Round
from dflash_tools.sizes import counted


@dataclasses.dataclass
class ChatStatistics:
    """Sums over all answers, those that were stopped included."""

    answers: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    """Of the prompts: those whose rows were there already."""
    rounds: int = 0
    """Of draft and verify."""
    round_tokens: int = 0
    """What those committed, the target's own tokens included."""
    last: str = ""
    """The newest answer, in words."""

    def add(self, prompt_tokens: int, rounds: Sequence[Round], words: str) -> None:
        """Takes an answer in; one whose prompt has not been read yet has no rounds."""
        drafted = [done for done in rounds if done.proposed]
        self.answers += 1
        self.tokens += sum(len(done.committed) for done in rounds)
        self.prompt_tokens += prompt_tokens
        self.reused_tokens += rounds[0].kept_rows if rounds else 0
        self.rounds += len(drafted)
        self.round_tokens += sum(len(done.committed) for done in drafted)
        self.last = words

    def lines(self) -> list[str]:
        """What `/stats` says of the answers."""
        if not self.answers:
            return ["No answer yet."]
        told = [f"{counted(self.tokens, 'token')} in {counted(self.answers, 'answer')}"]
        if self.rounds:
            told.append(f"{self.round_tokens / self.rounds:.2f} tokens a round in {counted(self.rounds, 'round')}")
        told.append(f"{self.reused_tokens:,} of {self.prompt_tokens:,} prompt tokens were there already")
        return [f"Last answer: {self.last}", f"In all: {', '.join(told)}"]

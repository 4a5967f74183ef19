"""The text of an answer with what the drafter said in colour, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click

from dflash_runtime.backend import Round
from dflash_runtime.text_stream import TextStream

COLOURS = ("green", "cyan")
"""In turn, so that a block is told from the next."""
LEGEND = (
    f"{click.style('Green', fg=COLOURS[0])} and {click.style('cyan', fg=COLOURS[1])}, block by block in turn: drafted, "
    "and accepted by the target. No colour: the target's own tokens."
)


class BlockPainter:
    """Paints the rounds of one answer; the text is that of the stream, colours apart.

    A character that several tokens make up has the colour of the last of them.

    Args:
        decode: Tokens to text.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._text, self._blocks = TextStream(decode), 0

    def paint(self, rounds: Iterable[Round]) -> str:
        """The text that is certain after these rounds, the next ones of the answer."""
        return "".join(self._paint(done) for done in rounds)

    def finish(self) -> str:
        """The rest, when no round follows."""
        return self._text.finish()

    def _paint(self, done: Round) -> str:
        colour, painted = COLOURS[self._blocks % len(COLOURS)], []
        tokens = done.committed[:-1] if done.finish_reason == "stop" else done.committed  # a stop token has no text
        for i, token in enumerate(tokens):
            text = self._text.push(token)
            accepted = i < len(done.proposed) and done.proposed[i] == token
            painted.append(click.style(text, fg=colour) if accepted and text else text)
        self._blocks += len(done.proposed) > 0
        return "".join(painted)

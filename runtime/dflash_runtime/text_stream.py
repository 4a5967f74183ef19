"""Tokens to text as they come: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
_LONGEST_WAIT_TOKENS = 48


class TextStream:
    """Turns tokens into text piece by piece; the pieces joined are the text of all tokens.

    Decoding a token alone loses characters that span tokens and spaces that depend on the token before, and
    decoding everything each time is quadratic. So tokens are decoded behind those of the piece before, and the
    difference is shown once it ends in a whole character. Once a stop string is complete, `stopped` is true and nothing
    more comes.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop_strings: Sequence[str] = ()) -> None:
        self._decode, self._stop_strings = decode, stop_strings
        self._tokens: list[int] = []
        self._shown = 0  # how many of the tokens have left as text
        self._held = ""  # text that may still become a stop string
        self.stopped = False

    def push(self, token: int) -> str:
        """Adds a token and returns the text that is certain now."""
        self._tokens.append(token)
        piece = self._new_text()
        # So many broken bytes are no character on its way. Without text of its own a token is nobody's neighbour.
        if not piece or (piece.endswith(_REPLACEMENT) and len(self._tokens) - self._shown < _LONGEST_WAIT_TOKENS):
            return ""
        self._tokens, self._shown = self._tokens[self._shown :], len(self._tokens) - self._shown
        return self._hold_back(piece)

    def finish(self) -> str:
        """The rest, when no token follows."""
        return self._hold_back(self._new_text()) + self._held

    def _new_text(self) -> str:
        return self._decode(self._tokens)[len(self._decode(self._tokens[: self._shown])) :]

    def _hold_back(self, piece: str) -> str:
        if self.stopped:
            return ""
        text = self._held + piece
        found = [at for stop in self._stop_strings if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        waiting = max((_overlap(text, stop) for stop in self._stop_strings), default=0)
        self._held = text[len(text) - waiting :]
        return text[: len(text) - waiting]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)

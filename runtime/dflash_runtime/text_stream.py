"""Tokens to text as they come: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
_WINDOW_TOKENS = 16
_LONGEST_WAIT_TOKENS = 64


class TextStream:
    """Turns tokens into text piece by piece; the pieces joined are the text of all tokens.

    Decoding a token alone loses characters that span tokens and spaces that depend on the token before, and
    decoding everything each time is quadratic. So a short window is decoded and the difference shown. Once a stop
    string is complete, `stopped` is true and nothing more comes.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop_strings: Sequence[str] = ()) -> None:
        self._decode, self._stop_strings = decode, stop_strings
        self._window: list[int] = []
        self._shown = 0  # characters of the window's text that have left
        self._held = ""  # text that may still become a stop string
        self.stopped = False

    def push(self, token: int) -> str:
        """Adds a token and returns the text that is certain now."""
        self._window.append(token)
        text = self._decode(self._window)
        certain = len(text.rstrip(_REPLACEMENT))
        if certain < len(text) and len(self._window) > _LONGEST_WAIT_TOKENS:
            certain = len(text) - 1  # so many broken bytes are no character on its way
        piece = text[self._shown : certain]
        self._shown = max(self._shown, certain)
        if len(self._window) > _WINDOW_TOKENS:
            self._shrink_window(text)
        return self._hold_back(piece)

    def finish(self) -> str:
        """The rest, when no token follows."""
        rest = self._hold_back(self._decode(self._window)[self._shown :])
        rest, self._held = rest + self._held, ""
        return rest

    def _shrink_window(self, text: str) -> None:
        # Cut only where both sides decode to whole characters and together to the same text, spaces included:
        # the tokens kept are the left neighbours of what comes.
        for keep in range(4, 8):
            tail = self._decode(self._window[-keep:])
            head = self._decode(self._window[:-keep])
            whole = tail.strip(_REPLACEMENT) and not head.endswith(_REPLACEMENT)
            hopeless = len(self._window) > _LONGEST_WAIT_TOKENS and head + tail == text
            if hopeless or (whole and text.startswith(head) and text.endswith(tail)):
                self._shown -= len(text) - len(tail)
                self._window = self._window[-keep:]
                return

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

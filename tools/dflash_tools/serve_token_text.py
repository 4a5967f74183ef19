"""Tokens with probabilities, in step with the text that has left."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection

from dflash_runtime.text_stream import TextStream
from dflash_runtime.tokenizer import Tokenizer
from dflash_tools.serve_jobs import ScoredToken, TokenText

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
"""A byte as SentencePiece vocabularies name it."""


class TokenTexts:
    """Texts of single tokens of a bundle.

    A token is decoded behind another one: some tokenizers leave out the space at the beginning of a text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._before = tokenizer.encode_text("a")[-1:]
        self._before_text = tokenizer.decode(self._before)
        self._known: dict[int, tuple[str, bytes | None]] = {}

    def of(self, token: int) -> tuple[str, bytes | None]:
        """Text and bytes of a token; its name and no bytes where it stands for no text."""
        if token not in self._known:
            text = self.tokenizer.decode([*self._before, token]).removeprefix(self._before_text)
            name = self.tokenizer.name(token) or f"token_id:{token}"
            whole = text and _REPLACEMENT not in text
            self._known[token] = (text or name, text.encode() if whole else _part_of_character(name, text))
        return self._known[token]


def _part_of_character(name: str, text: str) -> bytes | None:
    """The bytes a token's name spells, in one of the two usual ways, if they show as `text`."""
    if _BYTE_TOKEN.fullmatch(name):
        found = bytes([int(name[3:5], 16)])
    elif all(character in _BYTE_OF for character in name):
        found = bytes(_BYTE_OF[character] for character in name)
    else:
        return None
    return found if found.decode("utf-8", "replace") == text else None


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's spelling: printable bytes as themselves, the others as the characters from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {chr(byte): byte for byte in printable}
    return {**spelled, **{chr(256 + i): byte for i, byte in enumerate(others)}}


_BYTE_OF = _byte_level_alphabet()


class ShownTokens:
    """Hands out the scored tokens of one answer as their text leaves.

    Args:
        texts: Of the bundle's tokens.
        stop_ids: Tokens that have no text and end the answer.
    """

    def __init__(self, texts: TokenTexts, stop_ids: Collection[int]) -> None:
        self._texts, self._stop_ids = texts, frozenset(stop_ids)
        self._stream = TextStream(texts.tokenizer.decode)
        self._measured = 0  # characters of the text of all tokens so far
        self._taken = 0  # scored tokens looked at
        self._waiting: deque[tuple[ScoredToken, int, int]] = deque()  # with the places where their text begins and ends

    def until(self, scored: list[ScoredToken], shown_chars: int) -> list[TokenText]:
        """The next tokens whose text is within the first `shown_chars` of the answer."""
        for token in scored[self._taken :]:
            begin = self._measured
            if token.token_id not in self._stop_ids:
                self._measured += len(self._stream.push(token.token_id))
                self._waiting.append((token, begin, self._measured))
        self._taken = len(scored)
        found = []
        while self._waiting and self._waiting[0][2] <= shown_chars:
            found.append(self._told(*self._waiting.popleft()[:2]))
        return found

    def rest(self, shown_chars: int) -> list[TokenText]:
        """What begins within the answer and ends behind it, where a stop string cuts a token."""
        return [self._told(token, begin) for token, begin, _ in self._waiting if begin < shown_chars]

    def _told(self, token: ScoredToken, begin: int) -> TokenText:
        text, text_bytes = self._texts.of(token.token_id)
        top = [(*self._texts.of(other), logprob) for other, logprob in token.top]
        return TokenText(text, text_bytes, token.logprob, top, begin)

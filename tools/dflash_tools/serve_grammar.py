"""JSON schemas as a rule for every token, by llguidance."""

from __future__ import annotations

from collections.abc import Sequence

import llguidance
import llguidance.numpy
import numpy as np

from dflash_runtime.bundle import Bundle
from dflash_runtime.errors import DFlashError
from dflash_tools.serve_chooser import Logits
from dflash_tools.serve_errors import ApiError

_WHITE_SPACE = r"( |(\r?\n){1,2}[ \t]{0,20})?"
"""Between the words of a JSON text: enough to indent it, and no more, as a small model may go on with it for ever."""
_RULED_OUT = np.float32(-1e30)
"""Finite, as a score that is not is a fault of the model; its probability is 0 all the same."""


class JsonGrammars:
    """Compiles schemas for one bundle's tokens.

    Args:
        bundle: With a tokenizer.

    Raises:
        ApiError: the bundle has no stop token, so that a JSON text would have no end.
    """

    def __init__(self, bundle: Bundle) -> None:
        self._stop_ids = list(bundle.manifest.text.stop_token_ids)
        self._vocab_size = bundle.manifest.target.vocab_size
        if not self._stop_ids:
            raise ApiError(400, "response_format needs a bundle with a stop token, and this one has none.",
                           param="response_format", code="unsupported_value")  # fmt: skip
        path = bundle.path / "tokenizer" / "tokenizer.json"
        self._tokens = llguidance.LLTokenizer(str(path), n_vocab=self._vocab_size, eos_token=self._stop_ids)

    def compile(self, schema: str) -> JsonGrammar:
        """A grammar at its beginning.

        Args:
            schema: JSON text of a JSON schema.

        Raises:
            ApiError: the schema is none, or says what cannot be held to.
        """
        try:
            source = llguidance.LLMatcher.grammar_from_json_schema(
                schema, defaults={"whitespace_pattern": _WHITE_SPACE})  # fmt: skip
        except ValueError as error:
            raise _cannot_follow(str(error)) from error
        matcher = llguidance.LLMatcher(self._tokens, source, log_level=0)
        if matcher.is_error():
            raise _cannot_follow(matcher.get_error().partition("\n")[0])
        return JsonGrammar(matcher, self._vocab_size, frozenset(self._stop_ids))


def _cannot_follow(said: str) -> ApiError:
    return ApiError(400, f"The JSON schema cannot be followed: {said}.", param="response_format",
                    code="invalid_json_schema")  # fmt: skip


class JsonGrammar:
    """Where an answer stands in its schema; see `Grammar`."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, stop_ids: frozenset[int]) -> None:
        self._matcher, self._vocab_size, self._stop_ids = matcher, vocab_size, stop_ids

    def rule_out(self, logits: Logits, proposed: Sequence[int]) -> Logits:
        """See `Grammar.rule_out`. Rows behind a proposal that may not come stay as they are: nobody asks for them."""
        ruled, followed = logits.copy(), 0
        for i, row in enumerate(ruled):
            allowed = self._allowed()
            if np.isfinite(row).all():  # else the fault must be seen
                row[~allowed] = _RULED_OUT
            if i == len(proposed) or not allowed[proposed[i]] or proposed[i] in self._stop_ids:
                break
            self._consume(proposed[i])
            followed += 1
        self._matcher.rollback(followed)
        return ruled

    def take(self, tokens: Sequence[int]) -> None:
        """See `Grammar.take`."""
        for token in tokens:
            if token < 0 or token in self._stop_ids:
                return
            self._consume(token)

    def _allowed(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        mask = llguidance.numpy.allocate_token_bitmask(1, self._vocab_size)
        llguidance.numpy.fill_next_token_bitmask(self._matcher, mask)
        bits = np.unpackbits(mask.view(np.uint8)[0], bitorder="little")
        return bits[: self._vocab_size].astype(np.bool_)

    def _consume(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            said = self._matcher.get_error().partition("\n")[0] or "no token may come"
            raise DFlashError(f"The grammar of the JSON schema stops at token {token}: {said}. Simplify the schema.")

"""Level `tokens`: plain = PyTorch, speculative = plain, stop ids; below fp32 another token is judged by its margin."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from dflash_runtime import GenerationConfig, NumericsError, Session
from dflash_runtime.bundle import CheckRow
from dflash_tools.greedy_identity import first_difference
from dflash_tools.reference_file import Reference
from dflash_tools.validate_comparison import Bounds
from dflash_tools.validate_facts import Fact
from dflash_tools.validate_verdict import Divergence, Verdict, judge

_MOST_DIFFERENCES = 16
"""In one text and mode; more are no rounding."""


@dataclasses.dataclass(frozen=True)
class TokenDifference:
    """A token that is not the reference's, all before it being the reference's."""

    text: int
    place: int
    """Index among the new tokens."""
    found: int
    expected: int
    margin: float
    """By how much the reference's own logits prefer the expected one."""


def check_tokens(
    session: Session, reference: Reference, bounds: Bounds, block_sizes: Sequence[int], facts: Sequence[Fact]
) -> Verdict:
    """Generates every text in every mode.

    Args:
        session: On the engine.
        reference: What is right.
        bounds: fp32 allows no difference; half precision one within a multiple of PyTorch's own change of margins.
        block_sizes: To draft with; empty without a drafter.
        facts: About stop ids and prompts.
    """
    modes: list[tuple[str, dict[str, Any]]] = [("plain", {"plain": True})]
    modes += [(f"block {size}", {"block_size": size}) for size in block_sizes]
    rows, first = [fact.row() for fact in facts], next((f.divergence() for f in facts if f.is_wrong), None)
    chosen: dict[str, dict[tuple[int, int], int]] = {}
    for mode, options in modes:
        try:
            found = _differences(session, reference, bounds, options)
        except NumericsError as error:
            rows.append(CheckRow("tokens", f"{mode} = {reference.facts.oracle}", np.inf, 0.0, False, str(error)))
            return judge("tokens", rows, _not_finite(mode, str(error)))
        chosen[mode] = {(one.text, one.place): one.found for one in found}
        rows.append(_row(f"{mode} = {reference.facts.oracle}", found, reference, bounds))
        if first is None and found and not rows[-1].passed:
            first = _divergence(mode, found, bounds)
    for mode, _ in modes[1:]:
        apart = [place for place in chosen[mode].keys() | chosen["plain"].keys()
                 if chosen[mode].get(place) != chosen["plain"].get(place)]  # fmt: skip
        allowed = float(len(apart)) if not bounds.exact else 0.0  # in half precision each is judged above
        covered = f"{len(apart)} tokens differ" + ("" if bounds.exact else ", each judged by its margin above")
        rows.append(CheckRow("tokens", f"{mode} = plain", float(len(apart)), allowed, len(apart) <= allowed, covered))
    stop = _check_stop(session, reference, modes[-1][1], chosen[modes[-1][0]])
    rows.append(stop)
    if first is None and not stop.passed:
        first = Divergence("", "stop", None, "stop ids", stop.covered, "other tokens", "the text up to the stop id",
                           1.0, 0.0, "engine", "what happens at a stop id inside a block")  # fmt: skip
    return judge("tokens", rows, first)


def margin_of(reference: Reference, key: str, row: int, token: int) -> float:
    """By how much the reference prefers its likeliest token to `token`; infinite where that is none of the likely ones.

    A distance that is not known is under no bound.
    """
    ids, logits = reference.expected(f"{key}_ids")[row], reference.expected(f"{key}_logits")[row]
    place = np.flatnonzero(ids == token)
    return float(logits[0] - logits[int(place[0])]) if len(place) else np.inf  # best first


def _differences(session: Session, reference: Reference, bounds: Bounds, options: dict[str, Any]
                 ) -> list[TokenDifference]:
    """Every token that differs; behind one, generation goes on from the reference's own text."""
    found: list[TokenDifference] = []
    for index, text in enumerate(reference.facts.texts):
        start, count = 0, 0
        while start < len(text.tokens) and count < (1 if bounds.exact else _MOST_DIFFERENCES):
            expected = text.tokens[start:]
            config = GenerationConfig(max_new_tokens=len(expected), stop_token_ids=(), reuse_prefix=False, **options)
            tokens = session.generate([*text.ids, *text.tokens[:start]], config).token_ids
            place = first_difference(expected, tokens)
            if place is None:
                break
            token = tokens[place] if place < len(tokens) else -1
            place += start
            margin = margin_of(reference, f"text{index}.top", place, token)
            found.append(TokenDifference(index, place, token, text.tokens[place], margin))
            start, count = place + 1, count + 1
    return found


def _row(name: str, found: Sequence[TokenDifference], reference: Reference, bounds: Bounds) -> CheckRow:
    texts = reference.facts.texts
    count = sum(len(text.tokens) for text in texts)
    covered = f"{count} greedy tokens after {len(texts)} prompts"
    if bounds.exact:
        return CheckRow("tokens", name, float(len(found)), 0.0, not found and count > 0, covered)
    margin, bound = max((one.margin for one in found), default=0.0), bounds.margin("target")
    covered += f"; {len(found)} differ, by a margin of at most {margin:.3g} logits in fp32"
    return CheckRow("tokens", name, margin, bound, margin <= bound and count > 0, covered)


def _divergence(mode: str, found: Sequence[TokenDifference], bounds: Bounds) -> Divergence:
    one = found[0] if bounds.exact else max(found, key=lambda difference: difference.margin)
    where = f"text {one.text}, new token {one.place}, {mode}"
    cause = "an engine that computes other logits (see the first tensor of level graph), or a loop that commits others"
    if one.margin < 1e-3:
        cause = "a tie: the two logits are equal to the last bits, and another order of summing decides it"
    return Divergence("target", "token", None, "token", where, str(one.found), str(one.expected), one.margin,
                      bounds.margin("target"), "engine", cause)  # fmt: skip


def _not_finite(mode: str, words: str) -> Divergence:
    return Divergence("target", "logits", None, "head", mode, "not finite", "finite", np.inf, 0.0, "engine", words)


def _check_stop(session: Session, reference: Reference, options: dict[str, Any], differing: dict[tuple[int, int], int]
                ) -> CheckRow:
    """A stop id from the middle of each text ends it there, that token included."""
    wrong = count = 0
    for index, text in enumerate(reference.facts.texts):
        stop = text.tokens[len(text.tokens) // 2]
        expected = text.tokens[: text.tokens.index(stop) + 1]
        if any(one == index and place < len(expected) for one, place in differing):
            continue  # judged above: this text says something else before it stops
        config = GenerationConfig(
            max_new_tokens=len(text.tokens), stop_token_ids=[stop], reuse_prefix=False, **options
        )
        result = session.generate(text.ids, config)
        wrong += result.token_ids != expected or result.finish_reason != "stop"
        count += 1
    return CheckRow("tokens", "stop id", float(wrong), 0.0, wrong == 0, f"a stop id inside {count} texts")

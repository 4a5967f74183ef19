"""Level `state`: every KV row of both models that the runtime holds after all rounds of every text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dflash_runtime import GenerationConfig, NumericsError, Session
from dflash_runtime.backend import Backend
from dflash_runtime.bundle import CheckRow
from dflash_tools.greedy_identity import first_difference
from dflash_tools.held_rows import Held, held_rows
from dflash_tools.reference_file import Reference
from dflash_tools.reference_record import CONTEXT, ReferenceText
from dflash_tools.validate_comparison import Bounds, WorstRows, values_at
from dflash_tools.validate_places import CAUSES, place_of
from dflash_tools.validate_verdict import Divergence, Verdict, judge


class _Held(NamedTuple):
    """What is in the caches after a text."""

    words: str
    """After what, for people."""
    rows: int
    """Rows whose tokens are the reference's."""
    caches: Held


def replay_rounds(backend: Backend, text: ReferenceText) -> tuple[int, list[list[int]], list[list[int]]]:
    """Runs a text's own rounds: whatever the engine proposes, the reference's proposals are verified and committed.

    So every round is seen from the right state, also behind one in which the engine differs.

    Returns:
        Rows committed, and what the engine proposed and chose in each round.
    """
    backend.reset()
    proposals, choices = [], []
    chunk, position = backend.prefill_chunk_tokens, 0
    for start in range(0, len(text.ids), chunk):
        piece = text.ids[start : start + chunk]
        choices = [[backend.prefill(piece, start)]]
        backend.append_context(len(piece), start)
        position += len(piece)
    if not text.rounds:
        for token in text.tokens[:-1]:
            choices.append(backend.verify([token], position))
            position += 1
    for one in text.rounds:
        proposals.append(backend.draft(one.anchor, 1 + len(one.proposed), position))
        choices.append(backend.verify([one.anchor, *one.proposed], position))
        backend.append_context(1 + len(one.proposed), position)
        position += len(one.committed)
    return position, proposals, choices


def check_state(session: Session, backend: Backend, reference: Reference, bounds: Bounds, *, drafts: bool) -> Verdict:
    """Compares the runtime's own caches after each text with rows computed from the whole text at once.

    They are read after the decode loop has said the text, and after the reference's own rounds: below fp32 the loop may
    say other tokens, and its rows are compared as far as these are the reference's.

    Args:
        session: On the engine.
        backend: The session's backend.
        reference: What is right.
        bounds: What is allowed in the engine's precision.
        drafts: Whether the loop has a drafter.
    """
    worst, first, rows_seen, rejected = WorstRows("state"), None, 0, 0
    for index, text in enumerate(reference.facts.texts):
        try:
            for held in _states(session, backend, text, drafts):
                rows_seen += held.rows
                for model, number in _whole_calls(reference, index).items():
                    divergence = _compare(reference, index, model, number, held, bounds, worst)
                    first = first or divergence
        except NumericsError as error:
            row = CheckRow("state", "decode loop", np.inf, 0.0, False, str(error))
            return judge("state", [*worst.rows("before it ended"), row], first or _not_finite(index, str(error)))
        rejected += sum(1 + len(one.proposed) - len(one.committed) for one in text.rounds)
    rounds = sum(len(text.rounds) for text in reference.facts.texts)
    after = f"{rounds} rounds with {rejected} rejected proposals" if rounds else "plain steps"
    covered = f"{rows_seen} rows of {len(reference.facts.texts)} texts in the runtime's caches, after {after}"
    return judge("state", worst.rows(covered) if rows_seen else [], first)


def _states(session: Session, backend: Backend, text: ReferenceText, drafts: bool) -> Iterator[_Held]:
    """The caches after the decode loop, and after the reference's rounds; each is read before the next begins."""
    manifest = session.bundle.manifest
    config = GenerationConfig(
        max_new_tokens=len(text.tokens), block_size=text.block_size if drafts else None, plain=not drafts,
        stop_token_ids=(), reuse_prefix=False,
    )  # fmt: skip
    session.generate(text.ids, config)
    assert session._current is not None
    known, whole = session._current.known_ids, [*text.ids, *text.tokens]
    place = first_difference(whole, known)
    rows = len(known) - 1  # the newest token has none
    caches = held_rows(backend, manifest, rows)
    yield _Held("the decode loop", rows if place is None else min(place, rows), caches)
    rows, _, _ = replay_rounds(backend, text)
    session._current.known_ids = []  # they were the loop's
    yield _Held("the reference's rounds", rows, held_rows(backend, manifest, rows))


def _whole_calls(reference: Reference, text: int) -> dict[str, int]:
    """Model -> the call that computed all rows of a text at once."""
    facts = reference.facts
    found = {"target": facts.texts[text].whole_call}
    rows = facts.calls[found["target"]].rows
    for number, call in enumerate(facts.calls):
        if call.text == text and call.graph == CONTEXT and call.position == 0 and call.rows == rows:
            found["drafter"] = number
    return found


def _compare(reference: Reference, text: int, model: str, number: int, held: _Held, bounds: Bounds,
             worst: WorstRows) -> Divergence | None:
    graph, whole = reference.facts.calls[number].graph, held.caches.get(model, {})
    found = {name: cache.rows[: held.rows] for name, cache in whole.items()}
    wrong: list[tuple[int, str, float]] = []
    for name in reference.facts.tensors[number]:
        if not name.startswith("present."):
            continue
        allowed, key = bounds.allowed_state(graph, name), f"{number}/{name}"
        missing = name not in found
        first = 0 if missing else whole[name].first
        deviations = np.full(1, np.inf) if missing else reference.row_deviations(key, name, found[name])[first:]
        most = float(deviations.max(initial=0.0))
        worst.add(f"{model} {'keys' if name.endswith('key') else 'values'}", most, allowed)
        if not most <= allowed:
            wrong.append((first + int(np.argmax(~(deviations <= allowed))), name, most))
    if not wrong:
        return None
    row, name, deviation = min(wrong, key=lambda one: one[0])  # the first row; of several tensors the first computed
    place, key = place_of(name), f"{number}/{name}"
    values = ("missing", "a cache") if name not in found else values_at(reference, key, name, found[name], row)
    part = f"cached {'key' if name.endswith('key') else 'value'}"
    return Divergence(
        graph, name, place.layer, part, f"row {row} (position {row}) of text {text}, after {held.words}", *values,
        deviation, bounds.allowed_state(graph, name), "engine", CAUSES["cache"],
    )  # fmt: skip


def _not_finite(text: int, words: str) -> Divergence:
    return Divergence("target", "logits", None, "head", f"text {text}", "not finite", "finite", np.inf, 0.0, "engine",
                      words)  # fmt: skip

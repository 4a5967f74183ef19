"""Level `state`: every KV row of both models after all rounds of every text."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from dflash_runtime.backend import Backend
from dflash_tools.reference_file import Reference
from dflash_tools.reference_record import CONTEXT, ReferenceText
from dflash_tools.reference_tensors import Tensors
from dflash_tools.validate_comparison import Bounds, WorstRows, values_at
from dflash_tools.validate_places import CAUSES, place_of
from dflash_tools.validate_verdict import Divergence, Verdict, judge


class OpenBackend(Backend, Protocol):
    """A backend whose caches can be looked at."""

    def cache_rows(self, model: str) -> Tensors:
        """All rows of the caches of `target` or `drafter`, [rows, heads * D] by output name."""


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


def check_state(backend: OpenBackend, reference: Reference, bounds: Bounds) -> Verdict:
    """Compares the caches after the rounds of each text with rows computed from the whole text at once.

    Args:
        backend: The engine.
        reference: What is right.
        bounds: What is allowed in the engine's precision.
    """
    worst, first, rows_seen = WorstRows("state"), None, 0
    for index, text in enumerate(reference.facts.texts):
        rows, _, _ = replay_rounds(backend, text)
        rows_seen += rows
        for model, number in _whole_calls(reference, index).items():
            found = {name: array[:rows] for name, array in backend.cache_rows(model).items()}
            divergence = _compare(reference, index, model, number, found, bounds, worst)
            first = first or divergence
    rounds = sum(len(text.rounds) for text in reference.facts.texts)
    after = f"{rounds} rounds" if rounds else "plain steps"
    covered = f"{rows_seen} rows of {len(reference.facts.texts)} texts after {after}"
    return judge("state", worst.rows(covered), first)


def _whole_calls(reference: Reference, text: int) -> dict[str, int]:
    """Model -> the call that computed all rows of a text at once."""
    facts = reference.facts
    found = {"target": facts.texts[text].whole_call}
    rows = facts.calls[found["target"]].rows
    for number, call in enumerate(facts.calls):
        if call.text == text and call.graph == CONTEXT and call.position == 0 and call.rows == rows:
            found["drafter"] = number
    return found


def _compare(reference: Reference, text: int, model: str, number: int, found: Tensors, bounds: Bounds,
             worst: WorstRows) -> Divergence | None:
    graph = reference.facts.calls[number].graph
    wrong: list[tuple[int, str, float]] = []
    for name in reference.facts.tensors[number]:
        if not name.startswith("present."):
            continue
        allowed, key = bounds.allowed_state(graph, name), f"{number}/{name}"
        missing = name not in found
        deviations = np.full(1, np.inf) if missing else reference.row_deviations(key, name, found[name])
        worst.add(f"{model} {'keys' if name.endswith('key') else 'values'}", float(deviations.max()), allowed)
        if not deviations.max() <= allowed:
            wrong.append((int(np.argmax(~(deviations <= allowed))), name, float(deviations.max())))
    if not wrong:
        return None
    row, name, deviation = min(wrong, key=lambda one: one[0])  # the first row; of several tensors the first computed
    place, key = place_of(name), f"{number}/{name}"
    values = ("missing", "a cache") if name not in found else values_at(reference, key, name, found[name], row)
    return Divergence(
        graph, name, place.layer, "cache", f"row {row} of text {text}", *values, deviation,
        bounds.allowed_state(graph, name), "engine", CAUSES["cache"],
    )  # fmt: skip

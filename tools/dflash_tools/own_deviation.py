"""How far PyTorch that rounds is from PyTorch in fp32, on the very calls and rounds of a reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from dflash_export.deviation import deviation
from dflash_tools.graph_probe import GraphProbe, joined_taps
from dflash_tools.proposal_scores import scores_of
from dflash_tools.reference_calls import run_call
from dflash_tools.reference_record import CONTEXT, TARGET, Call, OwnDeviation, PairFacts, ReferenceText
from dflash_tools.reference_tensors import NEXT_COUNT, Array, Tensors, is_choice, likeliest


def own_deviation(
    calls: Sequence[Call], exact: Sequence[Tensors], texts: Sequence[ReferenceText], arrays: Mapping[str, Array],
    pair: PairFacts, twin: GraphProbe,
) -> OwnDeviation:
    """What a twin loses where it is given what is right, and where it goes by what it computed itself.

    Each graph's tensors are those of calls on the oracle's taps, so that a drafter that rounds nothing is held to fp32
    behind any target. Cache rows and proposals are those of the twin's own taps: an engine that rounds has no others.

    Args:
        calls: Of the reference.
        exact: What the oracle gave in each.
        texts: Of the reference, with their rounds.
        arrays: With `text{n}.round{r}_ids` and `_logits`, the best candidates of each proposal.
        pair: Whose.
        twin: The same models, rounding.
    """
    found = _Found(pair)
    own_taps = _from_right_taps(calls, exact, texts, twin, found)
    if own_taps and pair.mask_token_id is not None:
        _from_own_taps(calls, exact, own_taps, twin, found)
        for index, text in enumerate(texts):
            _rounds(index, text, own_taps[index], pair.mask_token_id, arrays, twin, found)
    return OwnDeviation(found.tensors, found.state, found.target_margin, found.draft_margin)


class _Found:
    """The largest of everything seen so far."""

    def __init__(self, pair: PairFacts) -> None:
        self.tensors = dict[str, float]()
        self.state = dict[str, float]()
        self.target_margin = self.draft_margin = 0.0
        self.proposes_likeliest = pair.proposes_likeliest

    def add(self, worst: dict[str, float], graph: str, found: Tensors, exact: Tensors) -> None:
        """Deviations of a call's tensors."""
        for name in [name for name in exact.keys() & found.keys() if not is_choice(name)]:
            key = f"{graph}/{name}"
            worst[key] = max(worst.get(key, 0.0), deviation(found[name], exact[name]))

    def add_proposals(self, found: Tensors, ids: Array, scores: Array) -> None:
        """Proposals of a round; of a selector up to its first other choice, which the later ones follow from."""
        own = scores_of(found, ids, likeliest_alone=self.proposes_likeliest)
        if not self.proposes_likeliest:
            others = np.flatnonzero(found["draft_ids"][:, 0] != ids[:, 0])
            count = int(others[0]) + 1 if len(others) else len(ids)
            own, scores = own[:count], scores[:count]
        self.draft_margin = max(self.draft_margin, _margin_change(found["draft_logits"], own, scores))


def _from_right_taps(
    calls: Sequence[Call], exact: Sequence[Tensors], texts: Sequence[ReferenceText], twin: GraphProbe, found: _Found
) -> dict[int, Array]:
    """Every call, the context's on the oracle's taps; gives the taps the twin itself computed of each text."""
    own_taps = dict[int, Array]()
    for number, call in _in_sequences(calls, range(len(calls)), twin):
        whole = texts[call.text].whole_call
        seen = run_call(twin, call, joined_taps(exact[whole]) if call.graph == CONTEXT else None)
        found.add(found.tensors, call.graph, seen, exact[number])
        if call.graph != TARGET:
            continue
        found.add(found.state, call.graph, seen, exact[number])
        found.target_margin = max(found.target_margin, _margins("logits", seen, exact[number]))
        if number == whole and any(name.startswith("taps.") for name in seen):
            own_taps[call.text] = joined_taps(seen)
    return own_taps


def _from_own_taps(
    calls: Sequence[Call], exact: Sequence[Tensors], own_taps: Mapping[int, Array], twin: GraphProbe, found: _Found
) -> None:
    """The drafter's calls again: rows of its caches, and logits, with all that the target's rounding brings."""
    chosen = [number for number, call in enumerate(calls) if call.graph != TARGET]
    for number, call in _in_sequences(calls, chosen, twin):
        seen = run_call(twin, call, own_taps[call.text])
        found.add(found.state, call.graph, seen, exact[number])
        if "draft_logits" in seen:
            found.draft_margin = max(found.draft_margin, _margins("draft_logits", seen, exact[number]))


def _rounds(
    index: int, text: ReferenceText, taps: Array, mask: int, arrays: Mapping[str, Array], twin: GraphProbe,
    found: _Found,
) -> None:
    """A text's own rounds, those that level acceptance compares, on the twin's taps."""
    twin.reset()
    twin.context(taps[: len(text.ids)], 0)
    for number, one in enumerate(text.rounds):
        if one.proposed:
            seen = twin.draft([one.anchor, *[mask] * len(one.proposed)], one.position)
            key = f"text{index}.round{number}"
            found.add_proposals(seen, arrays[f"{key}_ids"], arrays[f"{key}_logits"])
        twin.context(taps[one.position : one.position + len(one.committed)], one.position)


def _in_sequences(calls: Sequence[Call], chosen: Sequence[int], probe: GraphProbe) -> Iterator[tuple[int, Call]]:
    """The chosen calls in their order, on empty caches where a sequence begins."""
    before: int | None = None
    for number in chosen:
        if calls[number].sequence != before:
            probe.reset()
            before = calls[number].sequence
        yield number, calls[number]


def _margins(name: str, found: Tensors, exact: Tensors) -> float:
    """The change in a call's logits."""
    ids, logits = likeliest(exact[name])
    return _margin_change(found[name], np.take_along_axis(found[name], ids, -1), logits)


def _margin_change(found: Array, own: Array, exact: Array) -> float:
    """Largest change of the distance from the best candidate to one of the next best.

    Args:
        found: The twin's logits, of which one that is not finite makes the change infinite.
        own: What the twin gives the oracle's candidates, [R, k], NaN for what it did not consider.
        exact: What the oracle gives them, best first.
    """
    if not np.isfinite(found).all():
        return float("inf")
    changes = np.abs((exact[:, :1] - exact) - (own[:, :1] - own))[:, :NEXT_COUNT]
    return float(changes[~np.isnan(changes)].max(initial=0.0))

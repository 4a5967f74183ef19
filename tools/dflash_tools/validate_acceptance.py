"""Level `acceptance`: proposals, rounds and lengths against the reference's, and the gap with its class of cause."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from dflash_runtime import GenerationConfig, Session
from dflash_runtime.backend import Backend
from dflash_runtime.bundle import CheckRow
from dflash_tools.acceptance import mean_acceptance
from dflash_tools.reference_file import Reference
from dflash_tools.reference_record import ReferenceText
from dflash_tools.validate_comparison import Bounds
from dflash_tools.validate_facts import Fact, ids_of
from dflash_tools.validate_state import replay_rounds
from dflash_tools.validate_tokens import margin_of
from dflash_tools.validate_verdict import Divergence, Verdict, judge

NUMERICS = "numerics"


@dataclasses.dataclass(frozen=True)
class ProposalDifference:
    """A proposal that is not the reference's, made from the reference's own state."""

    text: int
    round: int
    slot: int
    """1 is the first proposal."""
    found: int
    expected: int
    margin: float
    """By how much the reference's own draft logits prefer the expected one."""


@dataclasses.dataclass(frozen=True)
class AcceptanceGap:
    """Mean acceptance length, tokens of a round with the target's own, on the same prompts."""

    engine: float
    reference: float
    cause: str | None
    """Class of cause where they differ: numerics, template or thinking mode, mask id, taps, window, ..."""

    def text(self) -> str:
        """The gap in one line."""
        line = f"acceptance length {self.engine:.3f} on the engine, {self.reference:.3f} in the reference"
        return line + (f": {self.cause}" if self.cause else "")


def check_acceptance(
    session: Session, backend: Backend, reference: Reference, bounds: Bounds, facts: Sequence[Fact], graphs_right: bool,
    can_draft: Callable[[int], bool],
) -> tuple[Verdict, AcceptanceGap]:
    """Drafts every text, freely and from the reference's own state before each round.

    Args:
        session: On the engine.
        backend: The session's backend.
        reference: What is right.
        bounds: fp32 allows no difference; half precision one within a multiple of PyTorch's own change of margins.
        facts: About the pair.
        graphs_right: Whether level graph passed, which tells numerics from other causes.
        can_draft: Whether the engine drafts blocks of a size as such; rounds of other sizes, as the last ones of a
            text are, are not compared.
    """
    rows, first = [fact.row() for fact in facts], next((f.divergence() for f in facts if f.is_wrong), None)
    texts, lengths, same_rounds = reference.facts.texts, list[list[int]](), 0
    for text in texts:
        config = GenerationConfig(
            max_new_tokens=len(text.tokens), block_size=text.block_size, stop_token_ids=(), reuse_prefix=False
        )
        result = session.generate(text.ids, config)
        own = _own_ids(session, text)
        lengths.append((result if own == text.ids else session.generate(own, config)).acceptance_lengths)
        count = next((n for n, one in enumerate(text.rounds) if not can_draft(1 + len(one.proposed))), len(text.rounds))
        rounds = text.rounds[:count]
        same_rounds += count > 0 and result.proposed_ids[:count] == [one.proposed for one in rounds] and (
            result.acceptance_lengths[:count] == [len(one.committed) for one in rounds]
        )
    found, compared = _differences(backend, reference, can_draft)
    rows.append(_proposal_row(found, compared, bounds))
    if bounds.exact:
        wrong = float(len(texts) - same_rounds)
        covered = f"proposals, rounds and lengths of {len(texts)} texts, block {texts[0].block_size}"
        rows.append(CheckRow("acceptance", "rounds", wrong, 0.0, wrong == 0, covered))
    if first is None and compared and not all(row.passed for row in rows):
        first = _divergence(found, bounds)
    gap = _gap(lengths, reference, facts, _engine_cause(rows, found, bounds, graphs_right))
    return judge("acceptance", rows, first, [gap.text()]), gap


def _own_ids(session: Session, text: ReferenceText) -> list[int]:
    """What the bundle itself makes of a prompt: acceptance is measured as a user would see it."""
    if text.prompt is None or session.tokenizer is None:
        return text.ids
    ids = ids_of(session.tokenizer, text.prompt)
    fits = 0 < len(ids) <= session.bundle.manifest.max_context_tokens - len(text.tokens)
    return ids if fits else text.ids


def _differences(
    backend: Backend, reference: Reference, can_draft: Callable[[int], bool]
) -> tuple[list[ProposalDifference], list[int]]:
    """The proposals that differ, and how many were compared in each round."""
    found, compared = [], []
    for index, text in enumerate(reference.facts.texts):
        _, proposals, _ = replay_rounds(backend, text)
        for number, (one, proposed) in enumerate(zip(text.rounds, proposals, strict=True)):
            if not can_draft(1 + len(proposed)):
                continue
            compared.append(len(proposed))
            pairs = list(enumerate(zip(proposed, one.proposed, strict=True)))
            wrong = [slot for slot, (ours, theirs) in pairs if ours != theirs]
            if not reference.facts.pair.proposes_likeliest:
                wrong = wrong[:1]  # a selector's later choices follow from this one
            for slot in wrong:
                margin = margin_of(reference, f"text{index}.round{number}", slot, proposed[slot])
                found.append(
                    ProposalDifference(index, number, slot + 1, proposed[slot], one.proposed[slot], margin)
                )
    return found, compared


def _proposal_row(found: Sequence[ProposalDifference], compared: Sequence[int], bounds: Bounds) -> CheckRow:
    covered = f"{sum(compared)} proposals in {len(compared)} rounds, each from the right state"
    if bounds.exact:
        return CheckRow("acceptance", "proposals", float(len(found)), 0.0, not found and sum(compared) > 0, covered)
    margin, bound = max((one.margin for one in found), default=0.0), bounds.margin("drafter")
    covered += f"; {len(found)} differ, by a margin of at most {margin:.3g} logits in fp32"
    return CheckRow("acceptance", "proposals", margin, bound, margin <= bound and sum(compared) > 0, covered)


def _divergence(found: Sequence[ProposalDifference], bounds: Bounds) -> Divergence:
    if not found:
        return Divergence(
            "", "rounds", None, "loop", "free drafting", "other rounds", "the reference's", 1.0, 0.0, "engine",
            "the loop's bookkeeping: what it commits, where the next round begins, state left by a request before",
        )  # fmt: skip
    one = found[0] if bounds.exact else max(found, key=lambda difference: difference.margin)
    where = f"text {one.text}, round {one.round}, slot {one.slot}"
    return Divergence(
        "drafter", "draft_ids", None, "proposal", where, str(one.found), str(one.expected), one.margin,
        bounds.margin("drafter"), "engine",
        "the drafter's graphs (see level graph), or rows of its context that are stale, missing or of other tokens "
        "(see level state)",
    )  # fmt: skip


def _gap(
    lengths: Sequence[Sequence[int]], reference: Reference, facts: Sequence[Fact], engine_cause: str | None
) -> AcceptanceGap:
    ours = mean_acceptance(lengths)
    theirs = mean_acceptance([[len(one.committed) for one in text.rounds] for text in reference.facts.texts])
    means = [1.0 if mean is None else mean.over_rounds for mean in (ours, theirs)]
    cause = next((fact.cause for fact in facts if fact.is_wrong), None)
    if cause is None and (means[0] != means[1] or engine_cause != NUMERICS):
        cause = engine_cause or (NUMERICS if means[0] != means[1] else None)
    return AcceptanceGap(means[0], means[1], cause)


def _engine_cause(
    rows: Sequence[CheckRow], found: Sequence[ProposalDifference], bounds: Bounds, graphs_right: bool
) -> str | None:
    """The class of cause where the pair's facts are right, None where the engine is right as well."""
    if not graphs_right:
        return "graphs: see the first tensor of level graph"
    if found and not bounds.exact and all(row.passed for row in rows):
        return NUMERICS
    return None if all(row.passed for row in rows) else "state or loop of the engine"

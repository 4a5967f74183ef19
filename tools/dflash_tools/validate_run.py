"""A whole validation: every level of an engine against a reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dflash_runtime import NumericsError, Session
from dflash_runtime.backend import Backend
from dflash_runtime.bundle import Bundle
from dflash_runtime.tokenizer import Tokenizer
from dflash_tools.reference_calls import capacity_rows
from dflash_tools.reference_file import Reference, require_fitting
from dflash_tools.reference_making import Progress
from dflash_tools.reference_record import INT8_PRODUCTS
from dflash_tools.validate_acceptance import AcceptanceGap, check_acceptance
from dflash_tools.validate_comparison import Bounds
from dflash_tools.validate_engine import Engine
from dflash_tools.validate_facts import drafting_facts, prompt_facts, text_facts
from dflash_tools.validate_graph import CallResult, check_graphs
from dflash_tools.validate_speed import check_speed
from dflash_tools.validate_state import check_state
from dflash_tools.validate_tokens import check_tokens
from dflash_tools.validate_verdict import FAILED, LEVELS, Verdict, all_passed, judge, not_finite, skipped


@dataclasses.dataclass(frozen=True)
class Validation:
    """What a validation found."""

    bundle: str
    backend: str
    precision: str
    """What the engine computes in."""
    oracle: str
    """What it was compared with."""
    verdicts: list[Verdict]
    gap: AcceptanceGap | None

    @property
    def passed(self) -> bool:
        """Whether something was checked and nothing failed."""
        return all_passed(self.verdicts)


def validate(
    bundle: Bundle, engine: Engine, reference: Reference, progress: Progress, levels: Sequence[str] = LEVELS
) -> Validation:
    """Runs the levels in their order.

    Args:
        bundle: What is validated.
        engine: On which engine.
        reference: What is right.
        progress: Called with stage, done, total.
        levels: Which of them.

    Raises:
        BundleError: the reference is of another pair, or has no bounds for the engine's precision.
        DFlashError: the engine cannot be opened.
    """
    require_fitting(reference, bundle)
    bounds = Bounds(reference, engine.precision)
    verdicts: dict[str, Verdict] = {}
    if "graph" in levels:
        progress("validate graph", 0, 1)
        verdicts["graph"] = _graphs(bundle, engine, reference, bounds)
        progress("validate graph", 1, 1)
    gap = None
    if set(levels) - {"graph"}:
        backend = engine.backend()
        with Session(bundle, backend, Tokenizer.open(bundle)) as session:
            gap = _words(bundle, session, engine, backend, reference, bounds, levels, verdicts, progress)
    ordered = [verdicts[level] for level in LEVELS if level in verdicts]
    return Validation(str(bundle.path), engine.name, engine.precision, reference.facts.oracle, ordered, gap)


def _graphs(bundle: Bundle, engine: Engine, reference: Reference, bounds: Bounds) -> Verdict:
    """Level `graph`; an engine that rounds activations is looked at without that rounding too, to fp32's bound."""
    rows = capacity_rows(reference.facts.calls, max(bundle.manifest.block_sizes))
    verdict, bad = check_graphs(engine.probe(rows), reference, bounds)
    if engine.precision == INT8_PRODUCTS:
        try:
            from dflash_tools.validate_bisect import check_without_rounding
        except ModuleNotFoundError as error:
            note = f"weights were seen through int8 activations alone; the closer look needs {error.name}: "
            return dataclasses.replace(verdict, notes=[*verdict.notes, note + _remedy(error)])
        exact, worse = check_without_rounding(bundle, engine.name, reference)
        bad = worse or bad
        verdict = judge("graph", [*verdict.rows, *exact.rows], exact.first or verdict.first, verdict.notes)
    return verdict if bad is None else _closer(verdict, bundle, reference, engine, bad)


def _words(
    bundle: Bundle, session: Session, engine: Engine, backend: Backend, reference: Reference, bounds: Bounds,
    levels: Sequence[str], verdicts: dict[str, Verdict], progress: Progress,
) -> AcceptanceGap | None:
    """The levels that need a session."""
    manifest, gap = bundle.manifest, None
    sizes = manifest.block_sizes if manifest.drafter is not None else []
    graph_failed = "graph" in verdicts and verdicts["graph"].status == FAILED
    for level in [level for level in LEVELS[1:] if level in levels]:
        progress(f"validate {level}", 0, 1)
        if level == "state":
            state = check_state(session, backend, reference, bounds, drafts=bool(sizes))
            if state.first is not None and graph_failed:
                why = "what level graph names first: these rows are made by its graphs"
                state = dataclasses.replace(state, first=dataclasses.replace(state.first, cause=why))
            verdicts[level] = state
        elif level == "tokens":
            facts = text_facts(bundle, reference.facts)
            verdicts[level] = check_tokens(session, reference, bounds, sizes, facts)
        elif level == "acceptance" and not sizes and not reference.facts.pair.has_drafter:
            verdicts[level] = skipped(level, "the pair has no drafter")
        else:
            try:
                if level == "speed":
                    text = reference.facts.texts[0]
                    verdicts[level] = check_speed(session, text, text.block_size if sizes else None)
                else:
                    pair = [*drafting_facts(bundle, reference.facts), *prompt_facts(bundle, reference.facts, level)]
                    verdicts[level], gap = check_acceptance(
                        session, backend, reference, bounds, pair, not graph_failed, engine.can_draft
                    )
            except NumericsError as error:
                verdicts[level] = not_finite(level, str(error))
        progress(f"validate {level}", 1, 1)
    return gap


def _closer(verdict: Verdict, bundle: Bundle, reference: Reference, engine: Engine, bad: CallResult) -> Verdict:
    """The verdict with the first inner tensor, where debug engines can be opened here and show the fault."""
    try:
        from dflash_tools.validate_bisect import look_inside
    except ModuleNotFoundError as error:
        note = f"the first tensor is named from what the engine hands out; finer parts need {error.name}: "
        return dataclasses.replace(verdict, notes=[*verdict.notes, note + _remedy(error)])
    found, asked = look_inside(bundle, reference, engine.name, engine.precision, bad)
    if found is None:
        note = f"the fault is the engine's own: it does not show on {asked or 'a debug engine, as there is none here'}"
        return dataclasses.replace(verdict, notes=[*verdict.notes, note])
    return dataclasses.replace(verdict, first=found)


def _remedy(error: ModuleNotFoundError) -> str:
    return f"pip install 'dflash-export[{'ort' if error.name == 'onnxruntime' else 'engines'}]'"

"""Level `speed`: sanity only. A round that costs more than decoding its tokens one by one is broken."""

from __future__ import annotations

import dataclasses
import math

from dflash_runtime import GenerationConfig, GenerationResult, Session
from dflash_runtime.bundle import CheckRow
from dflash_tools.reference_record import ReferenceText
from dflash_tools.validate_verdict import Divergence, Verdict, judge

MOST_STEPS = 3.0
"""A round may cost this many times its block size in plain steps; parallel verification costs a fraction of it."""
_REPEATS = 5


def check_speed(session: Session, text: ReferenceText, block_size: int | None) -> Verdict:
    """Times one text, the best of some runs.

    Args:
        session: On the engine.
        text: What to generate.
        block_size: To draft with, None without a drafter.
    """
    count = len(text.tokens)
    config = GenerationConfig(max_new_tokens=count, stop_token_ids=(), reuse_prefix=False)
    plain = _fastest(session, text, dataclasses.replace(config, plain=True))
    step_ms = 1000 / plain.tokens_per_s if plain.tokens_per_s else math.inf
    rows = [_row("plain step", step_ms, math.isfinite(step_ms), f"{step_ms:.3g} ms a token, {count} tokens")]
    if block_size is not None:
        result = _fastest(session, text, dataclasses.replace(config, block_size=block_size))
        seconds = (count - 1) / result.tokens_per_s if result.tokens_per_s else math.inf
        round_ms = 1000 * seconds / max(1, result.num_drafts)
        allowed = MOST_STEPS * block_size * step_ms
        covered = f"{round_ms:.3g} ms a round of block {block_size}, {round_ms / step_ms:.2f} plain steps"
        rows.append(CheckRow("speed", "round", round_ms, allowed, round_ms <= allowed, covered))
    first = None
    if not all(row.passed for row in rows):
        bad = next(row for row in rows if not row.passed)
        first = Divergence("", bad.tensor, None, "speed", "timing", f"{bad.worst:.3g} ms", f"{bad.tolerance:.3g} ms",
                           bad.worst, bad.tolerance, "engine", "weights copied in every call, threads that wait for "
                           "each other, or a graph that runs row by row")  # fmt: skip
    return judge("speed", rows, first)


def _fastest(session: Session, text: ReferenceText, config: GenerationConfig) -> GenerationResult:
    return max((session.generate(text.ids, config) for _ in range(_REPEATS)), key=lambda result: result.tokens_per_s)


def _row(name: str, value: float, passed: bool, covered: str) -> CheckRow:
    return CheckRow("speed", name, value, math.inf, passed, covered)

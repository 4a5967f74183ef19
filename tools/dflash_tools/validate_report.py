"""A validation as text and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from dflash_tools.bundle_summary import check_table
from dflash_tools.validate_run import Validation


def report_lines(found: Validation) -> Iterator[str]:
    """The validation as a table for each level."""
    yield f"{found.bundle}: {found.backend} ({found.precision}) against {found.oracle}"
    for verdict in found.verdicts:
        yield ""
        yield f"{verdict.level:<12}{verdict.status.upper()}"
        if verdict.rows:
            yield from (f"  {line}" for line in check_table(verdict.rows))
        if verdict.first is not None:
            yield f"  first: {verdict.first.text()}"
        yield from (f"  {note}" for note in verdict.notes)
    yield ""
    yield f"{'verdict':<12}{'PASSED' if found.passed else 'FAILED'}"


def report_json(found: Validation) -> dict[str, Any]:
    """The validation as plain JSON values; a number that is not finite becomes text."""
    data = dataclasses.asdict(found)
    plain: dict[str, Any] = _plain({**data, "passed": found.passed})
    return plain


def failure_line(found: Validation) -> str:
    """What failed first, in one sentence."""
    failed = [verdict for verdict in found.verdicts if verdict.status == "failed"]
    if not failed:
        return "nothing was checked, so nothing is proven"
    levels = ", ".join(verdict.level for verdict in failed)
    first = next((verdict.first for verdict in failed if verdict.first is not None), None)
    detail = first.text() if first is not None else "; ".join(failed[0].notes)
    return f"validation failed at {levels}: {detail}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

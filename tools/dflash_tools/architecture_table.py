"""The gate's verdicts as a compact table for the README."""

from __future__ import annotations

import re
from collections import defaultdict

from dflash_tools.architecture_check import Verdict


def as_markdown(verdicts: list[Verdict]) -> str:
    """Lists the exact architectures and groups the others by their reason.

    Args:
        verdicts: In any order.
    """
    exact = sorted({verdict.model_type for verdict in verdicts if verdict.status == "exact"}, key=str.lower)
    lines = [
        f"**{len(exact)} exact**: " + ", ".join(f"`{name}`" for name in exact),
        "",
        "| refused | why |",
        "|---|---|",
    ]
    groups: dict[str, set[str]] = defaultdict(set)
    for verdict in verdicts:
        if verdict.status != "exact":
            groups[_general(verdict)].add(verdict.model_type)
    for reason, names in sorted(groups.items(), key=lambda item: -len(item[1])):
        lines.append(f"| {', '.join(f'`{name}`' for name in sorted(names))} | {reason} |")
    return "\n".join(lines) + "\n"


def _general(verdict: Verdict) -> str:
    """The reason without what is particular to one model: its name and its layer numbers."""
    reason = re.sub(r"^\w+ cannot be exported: ", "", verdict.reason.split("\n")[0]).rstrip(".")
    reason = re.sub(r"\blayers? \[?\d[\d, ]*\]?", "some layers ", reason).replace("  ", " ")
    reason = reason.replace("some layers asks", "some layers ask")
    reason = re.sub(r"layers of kind [\w, ]+ keep", "layers keep", reason)
    reason = re.sub(r"list of \d+ decoder", "list of one entry for each of its decoder", reason)
    reason = re.sub(rf"\b(of )?{verdict.model or 'nothing'}\b", "the model", reason).replace("|", "/")
    return reason if verdict.status == "refused" else f"{verdict.status}: {reason}"

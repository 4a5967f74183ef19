"""A validation as one HTML file that needs nothing else, in light and dark."""

from __future__ import annotations

import html
from collections.abc import Iterator

from dflash_tools.validate_run import Validation
from dflash_tools.validate_verdict import Verdict

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2128; --page: #ffffff; --line: #d4d9df; --soft: #f4f6f8; --dim: #5b6570;
  --good: #1a7f37; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaef; --page: #14181d; --line: #343b44; --soft: #1d2329;
  --dim: #9aa5b1; --good: #4cc46b; --bad: #ff7b72; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 70rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--dim); font-weight: 600; } td:last-child { min-width: 18rem; } .wide { overflow-x: auto; }
.passed { color: var(--good); } .failed { color: var(--bad); } .skipped, .note { color: var(--dim); }
.first { background: var(--soft); border-left: 4px solid var(--bad); padding: .6rem .9rem; overflow-wrap: anywhere; }
"""


def report_html(found: Validation) -> str:
    """The page."""
    verdict = "passed" if found.passed else "failed"
    title = f"{found.backend} ({found.precision}) against {found.oracle}"
    body = "\n".join(part for one in found.verdicts for part in _section(one))
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Validation: {html.escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        f'<h1>{html.escape(found.bundle)}</h1>\n<p>{html.escape(title)}: <strong class="{verdict}">{verdict}</strong>'
        f"</p>\n{body}\n</body>\n</html>\n"
    )


def _section(verdict: Verdict) -> Iterator[str]:
    yield f'<h2>{verdict.level}: <span class="{verdict.status}">{verdict.status}</span></h2>'
    if verdict.first is not None:
        yield f'<p class="first">{html.escape(verdict.first.text())}</p>'
    if verdict.rows:
        heads = "".join(f"<th>{name}</th>" for name in ("checked", "worst", "allowed", "", "covered"))
        yield f'<div class="wide"><table><tr>{heads}</tr>'
        for row in verdict.rows:
            state = "passed" if row.passed else "failed"
            cells = (row.tensor, f"{row.worst:.3g}", f"{row.tolerance:.3g}")
            yield (
                "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
                + f'<td class="{state}">{state}</td><td>{html.escape(row.covered)}</td></tr>'
            )  # fmt: skip
        yield "</table></div>"
    for note in verdict.notes:
        yield f'<p class="note">{html.escape(note)}</p>'

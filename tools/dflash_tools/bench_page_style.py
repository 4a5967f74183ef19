"""How the page of `bench` looks: one column, two colour schemes."""

from __future__ import annotations

STYLE = """\
:root {
  --paper: #ffffff; --ink: #1c2128; --faint: #5b6470; --line: #dfe3e8; --note: #fff4d6; --note-ink: #5d4200;
  --series-1: #2563c9; --series-2: #c2580a; --series-3: #1f8a5b; --series-4: #7d4fc4; --series-5: #b23a7a;
  --series-6: #6b7280;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171c; --ink: #e8ebef; --faint: #a3acb8; --line: #2d333c; --note: #3a2f12; --note-ink: #f5dfa6;
    --series-1: #6ea3ff; --series-2: #f0a35c; --series-3: #5fcb9b; --series-4: #b79af2; --series-5: #ea8fbc;
    --series-6: #a3acb8;
  }
}
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1060px; margin: 0 auto; padding: 32px 20px 64px; }
header { border-bottom: 1px solid var(--line); padding-bottom: 12px; margin-bottom: 20px; }
.kicker { color: var(--faint); font-size: 13px; margin: 0; }
h1 { font-size: 26px; line-height: 1.25; margin: 4px 0 8px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 0 0 2px; }
.headline { font-size: 17px; margin: 0 0 8px; }
.quiet { color: var(--faint); font-size: 13.5px; margin: 0 0 10px; }
.note { background: var(--note); color: var(--note-ink); padding: 8px 12px; border-radius: 6px; }
section { margin: 0 0 34px; }
figure { margin: 0; max-width: 860px; }
svg { width: 100%; height: auto; display: block; font: 13px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
svg text { paint-order: stroke; stroke: var(--paper); stroke-width: 4px; stroke-linejoin: round; }
svg .ink { fill: var(--ink); } svg .faint { fill: var(--faint); }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .reference { stroke: var(--ink); stroke-width: 1.5; stroke-dasharray: 4 3; }
svg .whisker, svg .whisker line { stroke: var(--ink); stroke-width: 1.4; }
svg .line { fill: none; stroke-width: 2; }
svg .fill.s1 { fill: var(--series-1); } svg .line.s1 { stroke: var(--series-1); }
svg .fill.s2 { fill: var(--series-2); } svg .line.s2 { stroke: var(--series-2); }
svg .fill.s3 { fill: var(--series-3); } svg .line.s3 { stroke: var(--series-3); }
svg .fill.s4 { fill: var(--series-4); } svg .line.s4 { stroke: var(--series-4); }
svg .fill.s5 { fill: var(--series-5); } svg .line.s5 { stroke: var(--series-5); }
svg .fill.s6 { fill: var(--series-6); } svg .line.s6 { stroke: var(--series-6); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 12.5px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 5px 7px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--faint); font-weight: 500; vertical-align: bottom; white-space: normal; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
ul { font-size: 13.5px; padding-left: 18px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 16px; font-size: 13.5px; margin: 8px 0; }
dt { color: var(--faint); } dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 640px) { dl { grid-template-columns: 1fr; } dd { margin-bottom: 6px; } }
"""

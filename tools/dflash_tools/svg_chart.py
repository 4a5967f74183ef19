"""Plots as SVG text for a page that works offline: bars, dots with whiskers, stacked bars, lines.

Colours are CSS variables of the page (`--series-1` ... `--series-6`, `--ink`, `--faint`, `--line`), so that one picture
serves light and dark. Series differ in their marks too, not in colour alone. Hovering a mark shows its numbers.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Callable, Sequence

WIDTH = 760
ROW = 30
LABEL_CHARACTER = 6.9
"""Width of a character of a row's label, about, at the page's 13 pixels."""
NUM_COLOURS = 6
WIDEST_WHISKER = 1.6
"""Times the largest value an axis reaches at most."""
_DASHES = ("", "7 4", "2 4", "10 4 2 4", "4 3", "12 5")


@dataclasses.dataclass(frozen=True)
class Measured:
    """One row of a bar or dot plot."""

    label: str
    value: float
    low: float
    high: float
    note: str
    """Written behind the mark."""
    colour: int = 0
    """Number of its series, from 0."""


@dataclasses.dataclass(frozen=True)
class Series:
    """One line of a line plot."""

    label: str
    points: list[tuple[float, float]]
    ranges: list[tuple[float, float]] | None = None
    """Low and high of each point."""


def bars(rows: Sequence[Measured], axis: str) -> str:
    """Horizontal bars from zero, with the range of each as a whisker."""
    return _rows(rows, axis, None)


def dots(rows: Sequence[Measured], axis: str, reference: float) -> str:
    """Dots with whiskers beside a line at `reference`, which a whisker must clear to mean anything."""
    return _rows(rows, axis, reference)


def stacked(rows: Sequence[tuple[str, Sequence[float]]], parts: Sequence[str], axis: str, unit: str) -> str:
    """Horizontal bars made of parts.

    Args:
        rows: Label and the value of each part.
        parts: What the parts are.
        axis: What the axis shows.
        unit: Written behind numbers.
    """
    left = _label_width([label for label, _ in rows])
    scale, ticks = _scale(0.0, max(sum(values) for _, values in rows), left, WIDTH - 90)
    top = 34
    height = top + ROW * len(rows) + 44
    out = [*_legend(parts, left), *_grid(ticks, scale, top - 6, height - 40, axis, height)]
    for i, (label, values) in enumerate(rows):
        y, start = top + ROW * i, 0.0
        out.append(_text(left - 10, y + 17, label, "end"))
        for k, value in enumerate(values):
            shown = max(value, 0.0)
            x, width = scale(start), scale(start + shown) - scale(start)
            title = f"{label}, {parts[k]}: {value:.2f} {unit}"
            out.append(_shape(f'<rect x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="{ROW - 10}"', k, title))
            start += shown
        out.append(_text(scale(start) + 8, y + 17, f"{sum(values):.1f} {unit}", "start", "faint"))
    return _svg(height, out, f"{axis}: " + ", ".join(label for label, _ in rows))


def lines(series: Sequence[Series], x_axis: str, y_axis: str, *, y_top: float | None = None) -> str:
    """Lines over a numeric axis, each with its own marks and its name in the legend."""
    left, right, top, height = 60, WIDTH - 24, 62, 352
    bottom = height - 48
    xs = [x for line in series for x, _ in line.points]
    highs = [high for line in series for _, high in line.ranges or line.points]
    x_scale, x_ticks = _scale(min(xs), max(xs), left + 14, right - 14)
    y_scale, y_ticks = _scale(0.0, y_top or max(highs), bottom, top)
    if len(set(xs)) <= 16 and all(x == int(x) for x in xs):
        x_ticks = sorted(set(xs))
    out = _legend([line.label for line in series], left, lines=True)
    for tick in y_ticks:
        y = y_scale(tick)
        out.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(_text(left - 8, y + 4, _number(tick), "end", "faint"))
    out += [_text(x_scale(tick), bottom + 20, _number(tick), "middle", "faint") for tick in x_ticks]
    out.append(_text((left + right) / 2, height - 8, x_axis, "middle", "faint"))
    out.append(_text(left - 36, top - 18, y_axis, "start", "faint"))
    for k, line in enumerate(series):
        out += _line(k, line, x_scale, y_scale)
    return _svg(height, out, f"{y_axis} over {x_axis}: " + ", ".join(line.label for line in series))


def _line(k: int, line: Series, x_scale: Callable[[float], float], y_scale: Callable[[float], float]) -> list[str]:
    placed = [(x_scale(x), y_scale(y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    dash = f' stroke-dasharray="{_DASHES[k % len(_DASHES)]}"' if _DASHES[k % len(_DASHES)] else ""
    out = [f'<polyline class="line s{_colour(k)}" points="{path}"{dash}/>']
    for i, (x, y) in enumerate(placed):
        if line.ranges is not None:
            low, high = (y_scale(value) for value in line.ranges[i])
            out.append(f'<line class="whisker" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>')
        title = f"{line.label}: {_number(line.points[i][0])}, {line.points[i][1]:.3g}"
        out.append(_mark(k, x, y, title))
    return out


def _rows(rows: Sequence[Measured], axis: str, reference: float | None) -> str:
    left = _label_width([row.label for row in rows])
    note = max(len(row.note) for row in rows) * LABEL_CHARACTER
    top = 10
    height = top + ROW * len(rows) + 44
    values = [row.value for row in rows] + ([] if reference is None else [reference])
    # One wild whisker must not press all others together: it runs off the axis, without an end.
    most = min(max(row.high for row in rows), WIDEST_WHISKER * max(values))
    least = 0.0 if reference is None else min(reference, *(row.low for row in rows))
    low = max(0.0, least - 0.08 * (most - least))
    scale, ticks = _scale(low, most, left, WIDTH - 20 - note)
    out = _grid(ticks, scale, top - 4, height - 40, axis, height)
    if reference is not None:
        x = scale(reference)
        out.append(f'<line class="reference" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 4}" y2="{height - 40}"/>')
        if reference not in ticks:
            out.append(_text(x, height - 24, _number(reference), "middle"))
    for i, row in enumerate(rows):
        y = top + ROW * i
        middle = y + ROW / 2 - 2
        title = f"{row.label}: {row.value:.2f} ({row.low:.2f} to {row.high:.2f})"
        out.append(_text(left - 10, y + 17, row.label, "end"))
        if reference is None:
            width = scale(row.value) - scale(low)
            shape = f'<rect x="{scale(low):.1f}" y="{y + 3}" width="{width:.1f}" height="{ROW - 10}" rx="2"'
            out.append(_shape(shape, row.colour, title))
        end = scale(min(row.high, most))
        out.append(_whisker(scale(row.low), end, middle, ends_in_sight=row.high <= most))
        if reference is not None:
            out.append(_shape(f'<circle cx="{scale(row.value):.1f}" cy="{middle}" r="6"', row.colour, title))
        out.append(_text(end + 12, y + 17, row.note, "start", "faint"))
    return _svg(height, out, f"{axis}: " + ", ".join(f"{row.label} {row.value:.2f}" for row in rows))


def _whisker(low: float, high: float, y: float, *, ends_in_sight: bool) -> str:
    seen = (low, high) if ends_in_sight else (low,)
    ends = "".join(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 4}" y2="{y + 4}"/>' for x in seen)
    return f'<g class="whisker"><line x1="{low:.1f}" x2="{high:.1f}" y1="{y}" y2="{y}"/>{ends}</g>'


def _grid(
    ticks: Sequence[float], scale: Callable[[float], float], top: float, bottom: float, axis: str, height: float
) -> list[str]:
    out = []
    for tick in ticks:
        x = scale(tick)
        out.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
        out.append(_text(x, bottom + 16, _number(tick), "middle", "faint"))
    out.append(_text((scale(ticks[0]) + scale(ticks[-1])) / 2, height - 6, axis, "middle", "faint"))
    return out


def _legend(names: Sequence[str], left: float, *, lines: bool = False) -> list[str]:
    out, x = [], left
    for k, name in enumerate(names):
        if lines:
            dash = f' stroke-dasharray="{_DASHES[k % len(_DASHES)]}"' if _DASHES[k % len(_DASHES)] else ""
            out.append(f'<line class="line s{_colour(k)}" x1="{x}" x2="{x + 26}" y1="10" y2="10"{dash}/>')
            out.append(_mark(k, x + 13, 10, name))
        else:
            out.append(_shape(f'<rect x="{x}" y="4" width="12" height="12" rx="2"', k, name))
        shift = 32 if lines else 18
        out.append(_text(x + shift, 14, name, "start"))
        x += shift + len(name) * LABEL_CHARACTER + 22
    return out


def _mark(k: int, x: float, y: float, title: str) -> str:
    square = f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"'
    diamond = f'<path d="M{x:.1f},{y - 6:.1f} l6,6 l-6,6 l-6,-6 z"'
    triangle = f'<path d="M{x:.1f},{y - 6:.1f} l6,10 l-12,0 z"'
    shapes = (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5"', square, triangle, diamond)
    return _shape(shapes[k % len(shapes)], k, title)


def _shape(opening: str, colour: int, title: str) -> str:
    name = opening[1 : opening.index(" ")]
    return f'{opening} class="fill s{_colour(colour)}"><title>{html.escape(title)}</title></{name}>'


def _colour(k: int) -> int:
    return k % NUM_COLOURS + 1


def _text(x: float, y: float, text: str, anchor: str, kind: str = "ink") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _svg(height: float, parts: Sequence[str], described: str) -> str:
    opening = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{html.escape(described)}">'
    return "\n".join([opening, *parts, "</svg>"])


def _label_width(labels: Sequence[str]) -> float:
    return min(0.45 * WIDTH, 24 + LABEL_CHARACTER * max(map(len, labels)))


def _scale(low: float, high: float, start: float, end: float) -> tuple[Callable[[float], float], list[float]]:
    """A function from values to pixels, and round values to mark on the axis; the axis reaches to the last mark."""
    high = high if high > low else low + 1
    step = nice_step((high - low) / 5)
    first = math.ceil(low / step - 1e-9) * step
    count = math.ceil((high - first) / step - 1e-9)
    ticks = [round(first + i * step, 10) for i in range(max(count, 1) + 1)]
    top = max(high, ticks[-1])
    return (lambda value: start + (value - low) / (top - low) * (end - start)), ticks


def nice_step(rough: float) -> float:
    """The next larger of 1, 2, 2.5, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"

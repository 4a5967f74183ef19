"""A picture of what the controller chose: block size and committed tokens over the time of decoding."""

from __future__ import annotations

import dataclasses
import html
import itertools
from collections.abc import Callable, Sequence

_Scale = Callable[[float], float]
WIDTH, HEIGHT = 860, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 840, 58, 282
_MEAN_OF = 8
"""Rounds around each point of the line."""
_STYLE = """\
svg { --ink: #1c2128; --faint: #5b6470; --line: #dfe3e8; --size: #2563c9; --mean: #c2580a; }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e8ebef; --faint: #a3acb8; --line: #2d333c; --size: #6ea3ff; --mean: #f0a35c; } }
text { font: 13px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: var(--ink); }
.faint { fill: var(--faint); } .grid { stroke: var(--line); } .end { stroke: var(--faint); stroke-dasharray: 3 3; }
.size { fill: var(--size); opacity: 0.45; } .mean { fill: none; stroke: var(--mean); stroke-width: 2; }
"""


@dataclasses.dataclass(frozen=True)
class ChosenRound:
    """One pass over the target."""

    block_size: int
    """1 is a plain step."""
    committed: int
    ms: float


def choices_chart(texts: Sequence[tuple[str, Sequence[ChosenRound]]]) -> str:
    """An SVG picture that stands alone, in light and dark.

    Bars are the block sizes that were chosen, the line is the mean of tokens a round committed, over the rounds around
    it; both over the milliseconds of decoding, one text after the other.

    Args:
        texts: Name and rounds of each.
    """
    total_ms = sum(done.ms for _, rounds in texts for done in rounds)
    largest = max(done.block_size for _, rounds in texts for done in rounds)

    def x_of(ms: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * ms / total_ms

    def y_of(tokens: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * tokens / largest

    out = [_grid(y, y_of(y)) for y in sorted({1, largest // 2, largest})]
    start_ms = 0.0
    for name, rounds in texts:
        out += _bars(rounds, start_ms, x_of, y_of) + _mean_line(rounds, start_ms, x_of, y_of)
        left = x_of(start_ms)
        start_ms += sum(done.ms for done in rounds)
        right = x_of(start_ms)
        out.append(f'<line class="end" x1="{right:.1f}" x2="{right:.1f}" y1="{_TOP}" y2="{_BOTTOM}"/>')
        out.append(_text((left + right) / 2, _BOTTOM + 18, name, "middle"))
    out.append(_text((_LEFT + _RIGHT) / 2, HEIGHT - 8, f"decoding, {total_ms / 1000:.1f} s in all", "middle", "faint"))
    out += [
        f'<rect class="size" x="{_LEFT}" y="12" width="14" height="14"/>', _text(_LEFT + 22, 24, "block size chosen"),
        f'<line class="mean" x1="{_LEFT + 170}" x2="{_LEFT + 194}" y1="19" y2="19"/>',
        _text(_LEFT + 202, 24, f"tokens committed by a round, mean of {_MEAN_OF}"),
    ]  # fmt: skip
    words = "Block sizes chosen while decoding: " + ", ".join(name for name, _ in texts)
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
    return "\n".join([f'{opening}aria-label="{html.escape(words)}">', f"<style>{_STYLE}</style>", *out, "</svg>", ""])


def _bars(rounds: Sequence[ChosenRound], start_ms: float, x_of: _Scale, y_of: _Scale) -> list[str]:
    out = []
    for size, group in itertools.groupby(rounds, lambda done: done.block_size):
        end_ms = start_ms + sum(done.ms for done in group)
        left, width, top = x_of(start_ms), x_of(end_ms) - x_of(start_ms), y_of(size)
        title = "plain decoding" if size == 1 else f"block size {size}"
        out.append(f'<rect class="size" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{_BOTTOM - top:.1f}">'
                   f"<title>{title}</title></rect>")  # fmt: skip
        start_ms = end_ms
    return out


def _mean_line(rounds: Sequence[ChosenRound], start_ms: float, x_of: _Scale, y_of: _Scale) -> list[str]:
    points = []
    for i, done in enumerate(rounds):
        near = rounds[max(0, i - _MEAN_OF // 2) : i + _MEAN_OF // 2]
        mean = sum(one.committed for one in near) / len(near)
        points.append(f"{x_of(start_ms + done.ms / 2):.1f},{y_of(mean):.1f}")
        start_ms += done.ms
    return [f'<polyline class="mean" points="{" ".join(points)}"/>']


def _grid(tokens: int, y: float) -> str:
    line = f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return line + _text(_LEFT - 8, y + 4, str(tokens), "end", "faint")


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "ink") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'

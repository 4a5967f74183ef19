from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from dflash_tools.svg_chart import WIDTH, Measured, Series, bars, dots, lines, nice_step, stacked


@pytest.mark.parametrize(
    ("rough", "step"), [(0.9, 1), (1, 1), (1.1, 2), (2.2, 2.5), (3, 5), (7, 10), (0.03, 0.05), (240, 250)]
)
def test_steps_are_round_numbers(rough: float, step: float) -> None:
    assert nice_step(rough) == pytest.approx(step)


def circles(plot: str) -> list[float]:
    return [float(x) for x in re.findall(r'<circle cx="([\d.]+)"', plot)]


def test_marks_lie_where_their_values_do() -> None:
    plot = dots([Measured("a", 1.0, 0.9, 1.1, ""), Measured("b", 2.0, 1.5, 3.0, "")], "times", 1.0)
    (reference,) = re.findall(r'class="reference" x1="([\d.]+)"', plot)
    first, second = circles(plot)
    assert first == float(reference) < second
    (whisker,) = re.findall(r'<g class="whisker"><line x1="([\d.]+)" x2="([\d.]+)"', plot)[1:]
    assert float(whisker[0]) < second < float(whisker[1])


def test_one_wild_whisker_does_not_press_the_others_together() -> None:
    plot = dots([Measured("a", 1.2, 1.1, 1.3, ""), Measured("wild", 2.0, 0.5, 900.0, "")], "times", 1.0)
    first, second = circles(plot)
    assert second - first > 100
    tame, wild = re.findall(r'<g class="whisker">(.*?)</g>', plot)
    assert (tame.count("<line"), wild.count("<line")) == (3, 2)  # without its end: it goes on
    assert all(float(x) <= WIDTH for x in re.findall(r'x2="([\d.]+)"', plot))


def test_bars_are_as_long_as_their_values() -> None:
    plot = bars([Measured("a", 10, 10, 10, "10"), Measured("b", 40, 40, 40, "40", 1)], "tokens")
    one, two = (float(w) for w in re.findall(r'<rect [^>]*width="([\d.]+)"', plot))
    assert two == pytest.approx(4 * one, abs=0.5)


def test_stacked_parts_touch_and_a_negative_rest_takes_no_room() -> None:
    plot = stacked([("a", [1.0, 3.0, -0.001])], ["x", "y", "z"], "ms", "ms")
    parts = re.findall(r'<rect x="([\d.]+)" y="37" width="([\d.]+)"', plot)
    (x0, w0), (x1, w1), (_, w2) = ((float(x), float(w)) for x, w in parts)
    assert x1 == pytest.approx(x0 + w0, abs=0.2)
    assert w1 == pytest.approx(3 * w0, abs=0.3)
    assert w2 == 0


def test_lines_differ_without_colour_and_stay_inside() -> None:
    points = [(64.0, 10.0), (1024.0, 30.0)]
    plot = lines([Series(f"s{i}", points, [(9.0, 11.0), (29.0, 31.0)]) for i in range(4)], "x", "y")
    dashes = re.findall(r"<polyline[^>]*?(stroke-dasharray=\"[^\"]+\")?/>", plot)
    assert len(set(dashes)) == 4
    numbers = [float(x) for pair in re.findall(r'points="([^"]+)"', plot) for x in re.split("[ ,]", pair)]
    assert all(0 <= x <= WIDTH for x in numbers)


def test_text_of_users_is_escaped() -> None:
    for plot in (
        bars([Measured("<b>&", 1, 1, 1, '"')], "<a>"),
        lines([Series("<i>", [(1.0, 1.0)])], "<x>", "<y>"),
        stacked([("<r>", [1.0])], ["<p>"], "<a>", "ms"),
    ):
        ElementTree.fromstring(plot)

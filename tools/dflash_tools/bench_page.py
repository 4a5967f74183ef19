"""The report of `bench` as one HTML file: no network, no scripts, readable in light and dark."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from dflash_tools import svg_chart
from dflash_tools.bench_job import OURS
from dflash_tools.bench_page_style import STYLE
from dflash_tools.bench_report import (
    BenchReport,
    comparison_line,
    device_words,
    headline,
    prompt_words,
    setting_words,
)
from dflash_tools.bench_result import Comparison, ModeResult, row_name
from dflash_tools.scripted_acceptance import SCRIPTABLE_BACKENDS
from dflash_tools.sizes import bytes_text
from dflash_tools.stage_times import STAGES


def page(reports: Sequence[BenchReport]) -> str:
    """The whole page; each bundle is a section."""
    titles = " and ".join(dict.fromkeys(report.pair.target for report in reports))
    body = "\n".join("\n".join(_section(report)) for report in reports)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{html.escape(titles)}: DFlash measured</title>\n<style>\n{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _section(report: BenchReport) -> Iterator[str]:
    pair = report.pair.target + (f" with {report.pair.drafter}" if report.pair.drafter else ", no drafter")
    yield f"<header><p class='kicker'>dflash-export bench {_e(report.tool_version)}, {_e(report.started)}</p>"
    yield f"<h1>{_e(pair)}</h1><p class='headline'>{_e(headline(report))}</p>"
    settings = f"{report.pair.backend}, {setting_words(report)}. {device_words(report)}."
    yield f"<p class='quiet'>{_e(settings)}</p></header>"
    for note in report.notes:
        yield f"<p class='note'>{_e(note)}</p>"
    yield from _speed(report)
    yield from _speedup(report)
    yield from _acceptance(report)
    yield from _cycle(report)
    yield from _contexts(report)
    yield from _table(report)
    yield from _detail_tables(report)
    yield from _facts(report)


def _speed(report: BenchReport) -> Iterator[str]:
    labels = list(dict.fromkeys(row.label for row in report.rows))
    rows = [
        svg_chart.Measured(
            row_name(row), row.tokens_per_s.median, row.tokens_per_s.lowest, row.tokens_per_s.highest,
            f"{row.tokens_per_s.median:.1f}", labels.index(row.label),
        )
        for row in report.rows
    ]  # fmt: skip
    about = "Decoding only, the first token left out. Bars are medians over the rounds, whiskers their whole range."
    yield _figure("Tokens a second", about, svg_chart.bars(rows, "tokens a second"))


def _speedup(report: BenchReport) -> Iterator[str]:
    ours = report.rows[0].label
    drafting = [c for c in report.comparisons if c.kind == "drafter" and c.first.startswith(f"{ours}, ")]
    if drafting:
        about = (
            "Against plain decoding of the same engine in the same rounds. Whiskers are the 95 % interval over the "
            "rounds: only one that clears the line at 1 is a speedup or a slowdown."
        )
        yield _figure("Speedup by block size", about, _dots(drafting, [c.first.partition(", ")[2] for c in drafting]))
    peers = [c for c in report.comparisons if c.kind == "engine"]
    if peers:
        labels = [_against(c) for c in peers]
        about = "This program against each peer in the same mode, same prompts, same rounds. Right of 1: faster here."
        yield _figure("Against peers", about, _dots(peers, labels))


def _against(comparison: Comparison) -> str:
    """`block 8 vs dflash (authors)`: the peer's mode is named where it is another one."""
    mode, other = comparison.first.partition(", ")[2], comparison.second
    return f"{mode} vs {other.removesuffix(f', {mode}')}"


def _dots(found: Sequence[Comparison], labels: Sequence[str]) -> str:
    rows = [
        svg_chart.Measured(
            label, c.effect.ratio, c.effect.low, c.effect.high, f"{c.effect.ratio:.2f} x, {c.effect.verdict}",
            1 if c.scripted_tokens else 0,
        )
        for label, c in zip(labels, found, strict=True)
    ]  # fmt: skip
    return svg_chart.dots(rows, "times as fast", 1.0)


def _acceptance(report: BenchReport) -> Iterator[str]:
    rows = [(row, row.acceptance) for row in report.rows if row.engine == OURS and not row.scripted_tokens]
    series = [
        svg_chart.Series(row.mode, [(i + 1, 100 * chance) for i, chance in enumerate(found.survival)])
        for row, found in rows
        if found is not None
    ]
    if series:
        about = "Share of rounds in which the drafter's proposals were accepted up to and including each position."
        plot = svg_chart.lines(series, "position in the block", "% of rounds", y_top=100)
        yield _figure("Acceptance by position", about, plot)


def _cycle(report: BenchReport) -> Iterator[str]:
    rows = [(row.mode, [row.stages_ms[name] for name in STAGES]) for row in report.rows if row.stages_ms]
    if rows:
        about = (
            "Mean of all cycles. Verify is the target's pass, context the rows it leaves for the drafter, host "
            "everything between calls. A cycle pays when it commits more tokens than it costs plain steps."
        )
        if report.pair.backend not in SCRIPTABLE_BACKENDS:
            about += " This backend drafts, verifies and accepts without the host: that time shows as verify."
        yield _figure("Where a cycle's time goes", about, svg_chart.stacked(rows, STAGES, "milliseconds", "ms"))


def _contexts(report: BenchReport) -> Iterator[str]:
    series = []
    for mode in dict.fromkeys(row.mode for row in report.contexts):
        own = [row for row in report.contexts if row.mode == mode]
        points = [(float(row.context_tokens), row.cycle_ms.median) for row in own]
        series.append(svg_chart.Series(mode, points, [(r.cycle_ms.lowest, r.cycle_ms.highest) for r in own]))
    if series:
        about = "Median time of one cycle, a plain step for plain decoding. Whiskers are the range over the rounds."
        yield _figure("Latency over context", about, svg_chart.lines(series, "tokens of context", "ms a cycle"))


def _detail_tables(report: BenchReport) -> Iterator[str]:
    stages = [
        [row_name(row), f"{row.prefill_ms or 0:.1f}", f"{row.prefill_context_ms or 0:.1f}",
         *(f"{row.stages_ms[name]:.2f}" for name in STAGES)]
        for row in report.rows
        if row.stages_ms is not None
    ]  # fmt: skip
    if stages:
        heads = ["engine, mode", "prefill", "its context rows", *(f"{name} a cycle" for name in STAGES)]
        yield _small_table("Milliseconds by stage", heads, stages)
    accepted = []
    for row in report.rows:
        if row.acceptance is not None:
            mean = row.acceptance.mean
            chances = " ".join(f"{100 * chance:.0f}" for chance in row.acceptance.survival)
            counts = " ".join(map(str, row.acceptance.histogram))
            accepted.append([row_name(row), f"{mean.over_rounds:.3f}", f"{mean.over_requests:.3f}", chances, counts])
    if accepted:
        heads = ["engine, mode", "tokens a round, mean over rounds", "mean over requests",
                 "% accepted up to position 1, 2, ...", "rounds with 0, 1, ... accepted"]  # fmt: skip
        yield _small_table("Acceptance", heads, accepted)


def _small_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{_e(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{_e(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f"<section><h2>{_e(title)}</h2><div class='wide'><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div></section>"
    )


def _table(report: BenchReport) -> Iterator[str]:
    yield "<section><h2>All numbers</h2><div class='wide'><table><thead><tr><th>engine, mode</th><th>precision</th>"
    yield "<th>tokens/s<br/>median (range)</th><th>first token<br/>ms</th><th>token ms<br/>p50 / p90 / p99</th>"
    yield "<th>arrival ms<br/>p50 / p90 / p99</th><th>tokens a round<br/>over rounds / requests</th>"
    yield "<th>same words<br/>as plain</th><th>J a token</th></tr></thead><tbody>"
    for row in report.rows:
        cells = [row_name(row), *_cells(row)]
        yield "<tr>" + "".join(f"<td>{_e(cell)}</td>" for cell in cells) + "</tr>"
    yield "</tbody></table></div>"
    yield "<ul>" + "".join(f"<li>{_e(comparison_line(c))}</li>" for c in report.comparisons) + "</ul></section>"


def _cells(row: ModeResult) -> list[str]:
    speed, mean = row.tokens_per_s, row.acceptance.mean if row.acceptance else None
    return [
        row.precision,
        f"{speed.median:.1f} ({speed.lowest:.1f} to {speed.highest:.1f})",
        f"{row.time_to_first_token_ms.median:.0f}",
        " / ".join(f"{ms:.1f}" for ms in row.token_ms),
        " / ".join(f"{ms:.1f}" for ms in row.arrival_ms),
        "-" if mean is None else f"{mean.over_rounds:.2f} / {mean.over_requests:.2f}",
        "-" if row.same_answers is None else f"{row.same_answers} of {row.answers}",
        "-" if row.joules_per_token is None else f"{row.joules_per_token:.3f}",
    ]


def _facts(report: BenchReport) -> Iterator[str]:
    memory, prompts = report.memory, report.prompts
    peaks = ", ".join(f"{label} {bytes_text(size)}" for label, size in memory.peak_resident_bytes.items())
    on_gpu = ", ".join(f"{label} {bytes_text(size)}" for label, size in memory.device_bytes.items())
    versions = ", ".join(f"{name} {v}" for own in report.versions.values() for name, v in own.items())
    states = [(report.before, "before"), (report.after, "after")]
    clocks = "; ".join(
        f"{when}: CPU {state.cpu_clock_mhz or 'not reported'} MHz, GPU {state.gpu_clock_mhz or 'not used'}, "
        f"load {'not reported' if state.load_average is None else f'{state.load_average:.2f}'}"
        for state, when in states
    )
    rows = [
        ("command", report.command),
        ("prompts", f"{prompt_words(prompts)}; wrapped as: {prompts.wrapping}; sha256 {prompts.sha256[:16]}"),
        ("machine", device_words(report)),
        ("clocks and load", clocks),
        ("memory", f"weights {bytes_text(memory.weight_bytes)}, KV caches {bytes_text(memory.kv_bytes)} at full "
                   f"context, engines {bytes_text(memory.engine_bytes)}"),
        ("peak resident", peaks),
        ("on the GPU", on_gpu or "none, or not reported"),
        ("energy", report.power_source or "not reported by this machine"),
        ("versions", versions),
    ]  # fmt: skip
    yield "<section><h2>Machine and command</h2><dl>"
    yield "".join(f"<dt>{_e(name)}</dt><dd>{_e(value)}</dd>" for name, value in rows)
    yield "</dl></section>"


def _figure(title: str, about: str, plot: str) -> str:
    return f"<section><h2>{_e(title)}</h2><p class='quiet'>{_e(about)}</p>\n<figure>{plot}</figure></section>"


def _e(text: str) -> str:
    return html.escape(text)

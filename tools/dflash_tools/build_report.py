"""What `build` and `add-drafter` print at their end."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from dflash_runtime.bundle import Bundle
from dflash_runtime.value_ranges import read_ranges
from dflash_tools.bundle_summary import check_table, engine_names, quantized_bytes, summary_lines, total_bytes
from dflash_tools.peak_memory import own_peak_bytes
from dflash_tools.sizes import bytes_text
from dflash_tools.tensorrt_report import report_json, report_lines

if TYPE_CHECKING:
    from dflash_engines.tensorrt_engines import BuiltEngines


class Report(Protocol):
    """What the exporter tells about its work."""

    @property
    def path(self) -> Path:
        """The bundle."""

    @property
    def seconds(self) -> float:
        """Time the work took."""

    @property
    def notes(self) -> list[str]:
        """What the user should know without having asked."""

    @property
    def engines(self) -> list[BuiltEngines]:
        """TensorRT engines that were built."""


def print_report(report: Report, *, as_json: bool) -> None:
    """Prints what was made, what it cost and how it was checked.

    Args:
        report: Of the exporter.
        as_json: One JSON object instead of text.
    """
    bundle = Bundle.open(report.path, check_files=False)
    peak = own_peak_bytes()
    if as_json:
        click.echo(json.dumps(_facts(report, bundle, peak), ensure_ascii=False))
        return
    for line in summary_lines(bundle):
        click.echo(line)
    click.echo(f"{'cost':<12}{report.seconds:.1f} s, peak memory {bytes_text(peak)} (mapped files included)")
    for note in report.notes:
        click.echo(f"{'note':<12}{note}")
    for built in report.engines:
        click.echo("")
        for line in report_lines(built):
            click.echo(line)
    click.echo("\nchecks")
    for line in check_table(bundle.manifest.checks):
        click.echo(f"  {line}")
    click.echo(f'\nRun it: dflash-export run {shlex.quote(str(bundle.path))} "Why is the sky blue?"')


def _facts(report: Report, bundle: Bundle, peak: int) -> dict[str, Any]:
    manifest, ranges = bundle.manifest, read_ranges(bundle)
    sizes = quantized_bytes(manifest)
    return {
        "path": str(bundle.path),
        "total_bytes": total_bytes(bundle),
        "precision": manifest.precision,
        "weight_bytes": sum(entry.length_bytes for entry in manifest.weights.values()),
        "quantized": {words: {"matrices": count, "bytes": size} for words, (count, size) in sizes.items()},
        "max_context_tokens": manifest.max_context_tokens,
        "block_sizes": manifest.block_sizes,
        "tap_layer_ids": manifest.taps.layer_ids,
        "has_drafter": manifest.drafter is not None,
        "engines": engine_names(bundle),
        "seconds": report.seconds,
        "peak_memory_bytes": peak,
        "kept_in_fp32": [] if ranges is None else [dataclasses.asdict(one) for one in ranges.beyond()],
        "notes": report.notes,
        "tensorrt_engines": [report_json(built) for built in report.engines],
        "checks": [dataclasses.asdict(row) for row in manifest.checks],
    }

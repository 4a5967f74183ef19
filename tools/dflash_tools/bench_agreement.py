"""Whether two runs of `bench` agree: `python -m dflash_tools.bench_agreement FIRST.json SECOND.json`.

Every ratio both runs measured is compared: the runs agree where its 95 % intervals overlap. Exit code 1 where one
does not.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import click

from dflash_runtime.bundle import decode
from dflash_runtime.errors import DFlashError, PromptError
from dflash_tools.bench_report import BenchReport
from dflash_tools.bench_result import Comparison
from dflash_tools.bench_statistics import FEWEST_ROUNDS, Effect
from dflash_tools.error_lines import DFlashCommand


@dataclasses.dataclass(frozen=True)
class Agreement:
    """One ratio in two runs."""

    name: str
    first: Effect
    second: Effect

    @property
    def agrees(self) -> bool:
        """Their intervals overlap."""
        return self.first.low <= self.second.high and self.second.low <= self.first.high


def agreements(first: Sequence[BenchReport], second: Sequence[BenchReport]) -> Iterator[Agreement]:
    """Every comparison that is in both runs, of bundles of the same name."""
    others = {key: comparison for report in second for key, comparison in _comparisons(report)}
    for report in first:
        for key, comparison in _comparisons(report):
            if key in others:
                yield Agreement(" against ".join(key[1:]), comparison.effect, others[key].effect)


def _comparisons(report: BenchReport) -> Iterator[tuple[tuple[str, str, str], Comparison]]:
    for comparison in report.comparisons:
        yield (report.pair.bundle, comparison.first, comparison.second), comparison


def _read(path: Path) -> list[BenchReport]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PromptError(f"{path} cannot be read as what `bench --json` writes ({error}).") from error
    return cast(list[BenchReport], decode(list[BenchReport], data, str(path)))


@click.command(cls=DFlashCommand)
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
def main(first: Path, second: Path) -> None:
    """Compares what two runs of `bench --json` say."""
    rows = list(agreements(_read(first), _read(second)))
    if not rows:
        raise DFlashError(f"{first} and {second} measured nothing in common.")
    few = [row for row in rows if min(len(row.first.rounds), len(row.second.rounds)) < FEWEST_ROUNDS]
    if few:
        raise DFlashError(f"A ratio of fewer than {FEWEST_ROUNDS} rounds has no spread to agree within. Measure more.")
    for row in rows:
        shown = [f"{effect.ratio:.2f} ({effect.low:.2f} to {effect.high:.2f})" for effect in (row.first, row.second)]
        click.echo(f"{'agree ' if row.agrees else 'DIFFER'}  {row.name}: {shown[0]} and {shown[1]}")
    different = [row for row in rows if not row.agrees]
    if different:
        raise DFlashError(f"{len(different)} of {len(rows)} ratios differ by more than their spread.")
    click.echo(f"All {len(rows)} ratios agree within their spread.")


if __name__ == "__main__":
    main()

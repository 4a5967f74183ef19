"""Compares two outputs of `dflash-export run --json`, plain and with the drafter.

    python -m dflash_tools.compare_runs PLAIN.json DRAFTED.json

Exit code 1 when a single token differs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from dflash_runtime.errors import DFlashError
from dflash_tools.error_lines import DFlashCommand


@click.command(cls=DFlashCommand)
@click.argument("plain", type=click.Path(exists=True, path_type=Path))
@click.argument("drafted", type=click.Path(exists=True, path_type=Path))
def main(plain: Path, drafted: Path) -> None:
    """Says whether two runs gave the same tokens, and what each cost."""
    one, two = (json.loads(path.read_text(encoding="utf-8")) for path in (plain, drafted))
    click.echo(f"{'':<14}{'tokens':>8}{'tokens/s':>10}{'first token':>13}{'rounds':>8}{'tokens a round':>16}")
    for name, run in (("plain", one), (f"block size {two['block_size']}", two)):
        click.echo(_row(name, run))
    count = len(one["token_ids"])
    differing = [
        i for i, pair in enumerate(zip(one["token_ids"], two["token_ids"], strict=False)) if pair[0] != pair[1]
    ]
    if differing or count != len(two["token_ids"]):
        where = differing[0] if differing else min(count, len(two["token_ids"]))
        raise DFlashError(f"The two runs differ from token {where} on.")
    click.echo(f"The words are the same: {count} of {count} tokens.")


def _row(name: str, run: dict[str, Any]) -> str:
    first = f"{run['time_to_first_token_ms']:.0f} ms"
    drafts = run["num_drafts"] or "-"
    accepted = f"{run['mean_acceptance_length']:.2f}" if run["num_drafts"] else "-"
    return f"{name:<14}{len(run['token_ids']):>8}{run['tokens_per_s']:>10.1f}{first:>13}{drafts:>8}{accepted:>16}"


if __name__ == "__main__":
    main()

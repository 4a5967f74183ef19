"""`dflash-export inspect`: what a bundle holds, how large, for which pair, checked how."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from dflash_runtime.bundle import Bundle
from dflash_runtime.device_engine import DeviceEngineRecord
from dflash_runtime.engine_record import engine_folder, open_engine
from dflash_runtime.value_ranges import read_ranges
from dflash_tools.bundle_summary import check_table, engine_names, summary_lines, total_bytes
from dflash_tools.error_lines import DFlashCommand
from dflash_tools.sizes import bytes_text


@click.command("inspect", cls=DFlashCommand, short_help="Say what a bundle holds.")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--verify", is_flag=True, help="Compute every file's hash again, engines included.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: the manifest and what was found.")
def command(bundle: Path, verify: bool, as_json: bool) -> None:
    """Says what BUNDLE holds, how large it is, for which pair, and how it was checked.

    A missing or altered file is an error. Hashes are computed once per copy of a bundle; --verify computes them
    again.
    """
    opened = Bundle.open(bundle, check_files=not verify)
    verified = opened.check_files(full=True) if verify else []
    engines = engine_names(opened) if verify else []
    for name in engines:
        _verify_engine(opened, name)
    if as_json:
        click.echo(json.dumps(_facts(opened, verified), ensure_ascii=False))
        return
    for line in summary_lines(opened):
        click.echo(line)
    click.echo("\nfiles")
    for name, facts in opened.manifest.files.items():
        click.echo(f"  {bytes_text(facts.size_bytes):>9}  {name}")
    click.echo("\nchecks")
    for line in check_table(opened.manifest.checks):
        click.echo(f"  {line}")
    if verify:
        click.echo(f"\nVerified the sha256 of {len(verified)} files and of {len(engines)} engine folder(s).")


def _verify_engine(bundle: Bundle, name: str) -> None:
    if name == "ort-cpu":
        open_engine(bundle, name)
    else:
        DeviceEngineRecord.read(engine_folder(bundle, name), f"Run: dflash-export engines {bundle.path} --backend ...")


def _facts(bundle: Bundle, verified: list[str]) -> dict[str, Any]:
    ranges = read_ranges(bundle)
    return {
        "path": str(bundle.path),
        "total_bytes": total_bytes(bundle),
        "engines": engine_names(bundle),
        "verified_files": verified,
        "ranges": None if ranges is None else dataclasses.asdict(ranges),
        "manifest": dataclasses.asdict(bundle.manifest),
    }

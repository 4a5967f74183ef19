"""`dflash-export engines`: lowers a bundle's graphs for a backend, again or on another machine."""

from __future__ import annotations

import json
from pathlib import Path

import click

from dflash_runtime.bundle import Bundle
from dflash_runtime.engine_record import engine_folder, open_engine
from dflash_tools.error_lines import DFlashCommand, needs_extra
from dflash_tools.sizes import bytes_text


@click.command("engines", cls=DFlashCommand, short_help="Lower a bundle's graphs for a backend.")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--backend", type=click.Choice(["ort-cpu"]), default="ort-cpu", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(bundle: Path, backend: str, as_json: bool) -> None:
    """Lowers BUNDLE's portable graphs for a backend. Needs neither torch nor Transformers."""
    opened = Bundle.open(bundle)
    with needs_extra("engines"):
        from dflash_engines.ort_cpu import lower_bundle
    lower_bundle(opened.path)
    record = open_engine(opened, backend)
    folder = engine_folder(opened, backend)
    if as_json:
        sizes = {name: facts.size_bytes for name, facts in record.files.items()}
        click.echo(json.dumps({"backend": backend, "path": str(folder), "file_bytes": sizes}))
        return
    size = sum(facts.size_bytes for facts in record.files.values())
    click.echo(f"Lowered {len(record.files)} graphs for {backend} into {folder} ({bytes_text(size)}).")
    click.echo(f"They execute in {record.execution_precision}, on the weights of the bundle.")

"""Resident memory of a session, against the weights it executes: `python -m dflash_tools.run_memory BUNDLE`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import click

from dflash_runtime.generation import GenerationConfig
from dflash_runtime.session import Session
from dflash_tools.error_lines import DFlashCommand
from dflash_tools.peak_memory import own_peak_bytes, resident_bytes
from dflash_tools.sizes import bytes_text

PROMPT = "Why is the sky blue? Answer in three sentences."
EXECUTED_ITEM_BYTES = 4
"""ort-cpu executes in fp32; values of quantised weights stay as they are."""


@click.command(cls=DFlashCommand)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--threads", type=click.IntRange(1), help="[default: ONNX Runtime chooses]")
@click.option("--tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(bundle: Path, threads: int | None, tokens: int, as_json: bool) -> None:
    """Opens BUNDLE, generates plainly and with its drafter, and reports resident memory and its peak."""
    with Session.open(bundle, threads=threads) as session:
        manifest = session.bundle.manifest
        for plain in (True, False):
            session.generate(PROMPT, GenerationConfig(max_new_tokens=tokens, plain=plain, reuse_prefix=False))
        resident = resident_bytes()
    weights = sum(
        entry.length_bytes if entry.dtype in ("U4", "U8") else math.prod(entry.shape) * EXECUTED_ITEM_BYTES
        for entry in manifest.weights.values()
    )
    facts = {
        "weight_bytes": weights,
        "resident_bytes": resident,
        "peak_bytes": own_peak_bytes(),
        "has_drafter": manifest.drafter is not None,
    }
    if as_json:
        click.echo(json.dumps(facts))
        return
    click.echo(f"weights in fp32   {bytes_text(weights)}{', drafter included' if manifest.drafter else ''}")
    click.echo(f"resident          {bytes_text(resident)}, {(resident - 200e6) / weights:.2f} x weights + 200 MB")
    click.echo(f"peak              {bytes_text(own_peak_bytes())}")


if __name__ == "__main__":
    main()

"""`dflash-export reference`: stores what PyTorch says of a pair, so that devices without torch can be validated."""

from __future__ import annotations

import json
from pathlib import Path

import click

from dflash_runtime.bundle import Bundle
from dflash_tools.error_lines import DFlashCommand, needs_extra
from dflash_tools.progress import ProgressLine
from dflash_tools.prompt_file import read_prompts
from dflash_tools.sizes import bytes_text


@click.command("reference", cls=DFlashCommand, short_help="Store PyTorch's answers, to validate without torch.")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--target", metavar="CHECKPOINT", help="The target's checkpoint. [default: where the bundle came from]")
@click.option("--drafter", metavar="CHECKPOINT", help="The drafter's. [default: where the bundle came from]")
@click.option("--prompts", type=click.Path(path_type=Path), help=".txt or .jsonl. [default: three short ones]")
@click.option("--precision", "precisions", type=click.Choice(["fp16", "bf16"]), multiple=True,
              help="Measure PyTorch's own deviation in this one too; repeatable. [default: the bundle's]")
@click.option("--new-tokens", type=click.IntRange(2), default=24, show_default=True, help="After each prompt.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder beside the bundle, for one that is read-only.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    bundle: Path, target: str | None, drafter: str | None, prompts: Path | None, precisions: tuple[str, ...],
    new_tokens: int, out: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Runs BUNDLE's checkpoints in PyTorch and stores inputs and outputs in it: a few megabytes.

    `dflash-export validate BUNDLE` then compares any engine with them, on a device without torch.
    """
    opened = Bundle.open(bundle)
    given = [] if prompts is None else read_prompts(prompts)
    with needs_extra("export"):
        from dflash_tools.reference_building import build_reference
        from dflash_tools.reference_file import add_to_bundle, require_writable, write_reference
    require_writable(opened, out)
    with ProgressLine() as progress:
        made = build_reference(
            opened, target, drafter, progress, prompts=given, precisions=precisions, new_tokens=new_tokens
        )
    place = add_to_bundle(opened, made) if out is None else write_reference(made, out)
    size, facts = place.stat().st_size, made.facts
    if as_json:
        rounds = [len(text.rounds) for text in facts.texts]
        click.echo(json.dumps({"path": str(place), "size_bytes": size, "texts": len(facts.texts), "rounds": rounds,
                               "calls": len(facts.calls), "precisions": sorted(facts.own)}))  # fmt: skip
        return
    click.echo(f"Stored {len(facts.calls)} calls on {len(facts.texts)} texts in {place} ({bytes_text(size)}).")
    beside = "" if out is None else f" --reference {place}"
    click.echo(f"Validate an engine with: dflash-export validate {bundle}{beside}")

"""`dflash-export validate`: does this bundle on this engine say what PyTorch says, and if not, where it begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_runtime.bundle import Bundle, write_atomically
from dflash_runtime.errors import BundleError, DFlashError, OutputError
from dflash_tools.error_lines import DFlashCommand, needs_extra
from dflash_tools.progress import ProgressLine
from dflash_tools.prompt_file import read_prompts

if TYPE_CHECKING:
    from dflash_tools.reference_file import Reference

_BACKENDS = ["ort-cpu", "ort-cuda", "tensorrt", "tensorrt-rtx", "portable"]
_LEVELS = ["graph", "state", "tokens", "acceptance", "speed"]


@click.command("validate", cls=DFlashCommand, short_help="Prove an engine against PyTorch, or name what is wrong.")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--backend", type=click.Choice(_BACKENDS), default="ort-cpu", show_default=True,
              help="Engine to validate; portable: the bundle's portable graphs.")
@click.option("--against", metavar="CHECKPOINT", help="Run this target checkpoint in PyTorch now; needs torch.")
@click.option("--drafter", metavar="CHECKPOINT", help="With --against: the drafter's. [default: where it came from]")
@click.option("--reference", "reference", is_flag=False, flag_value="", default=None, metavar="[FILE|FOLDER]",
              help="Use what PyTorch said when the reference was made, in the bundle or beside it. [default]")
@click.option("--prompts", type=click.Path(path_type=Path), help="With --against: .txt or .jsonl of prompts.")
@click.option("--level", "levels", type=click.Choice(_LEVELS), multiple=True, help="Only this one; repeatable.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads. [default: the backend chooses]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--html", type=click.Path(path_type=Path), help="Write a page with the same content.")
def command(bundle: Path, backend: str, as_json: bool, html: Path | None, levels: tuple[str, ...], threads: int | None,
            **options: Any) -> None:  # fmt: skip
    """Compares BUNDLE on an engine with PyTorch: graphs, cache rows, tokens, acceptance, speed.

    Without --against, the reference stored in the bundle is replayed, which needs no torch; `dflash-export reference`
    makes one. Where there is none, the portable graphs are what an engine is compared with. Exit code 1 when a level
    fails, or nothing was checked.
    """
    if html is not None and (html.is_dir() or not html.absolute().parent.is_dir()):
        raise OutputError(f"{html} is a folder, or in none that exists, so no page can be written there.")
    opened = Bundle.open(bundle)
    with ProgressLine() as progress, needs_extra("ort"):
        from dflash_tools.validate_engine import open_bundle_engine
        from dflash_tools.validate_run import validate

        engine = open_bundle_engine(opened, backend, threads)
        try:
            right = _reference(opened, backend, progress=progress, **options)
            found = validate(opened, engine, right, progress, levels or tuple(_LEVELS))
        finally:
            engine.close()
    from dflash_tools.validate_html import report_html
    from dflash_tools.validate_report import failure_line, report_json, report_lines

    if html is not None:
        write_atomically(html, report_html(found))
    if as_json:
        click.echo(json.dumps(report_json(found), ensure_ascii=False))
    else:
        for line in report_lines(found):
            click.echo(line)
    if not found.passed:
        raise DFlashError(failure_line(found))


def _reference(bundle: Bundle, backend: str, *, against: str | None, drafter: str | None, reference: str | None,
               prompts: Path | None, progress: ProgressLine) -> Reference:  # fmt: skip
    from dflash_tools.reference_file import find_reference, read_reference

    if against is not None and reference is not None:
        raise click.UsageError("--against and --reference are two ways to know what is right; give one.")
    if against is not None:
        with needs_extra("export"):
            from dflash_tools.reference_building import build_reference
        given = [] if prompts is None else read_prompts(prompts)
        return build_reference(bundle, against, drafter, progress, prompts=given, budgets={"outputs": 1 << 30,
                               "inner": 1 << 30})  # fmt: skip
    if drafter is not None or prompts is not None:
        raise click.UsageError("--drafter and --prompts go with --against: a stored reference has its own prompts.")
    place = find_reference(bundle, Path(reference) if reference else None)
    if place is not None:
        return read_reference(place)
    if reference is not None or backend == "portable":
        raise BundleError(
            f"{bundle.path} has no reference. Make one where torch is: dflash-export reference {bundle.path}; or "
            "compare with a checkpoint: --against CHECKPOINT"
        )
    with needs_extra("engines"):
        from dflash_tools.portable_reference import portable_reference
    return portable_reference(bundle, progress)

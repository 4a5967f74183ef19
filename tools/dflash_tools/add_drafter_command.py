"""`dflash-export add-drafter`: gives a bundle that has only a target its drafter."""

from __future__ import annotations

from pathlib import Path

import click

from dflash_tools.build_report import print_report
from dflash_tools.error_lines import DFlashCommand, needs_extra
from dflash_tools.option_values import read_template_args
from dflash_tools.progress import ProgressLine


@click.command("add-drafter", cls=DFlashCommand, short_help="Give a bundle its drafter.")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("drafter")
@click.option(
    "--block-size",
    "block_sizes",
    type=int,
    multiple=True,
    metavar="N",
    help="Block size to make engines for, anchor included; repeatable. [default: the drafter's own and smaller ones]",
)
@click.option(
    "--template-arg",
    "template_args",
    multiple=True,
    metavar="KEY=VALUE",
    help="Argument the chat template gets by default; repeatable. [default: what the drafter was trained with]",
)
@click.option("--backend", type=click.Choice(["ort-cpu", "none"]), default="ort-cpu", show_default=True)
@click.option("--gate", type=click.Choice(["auto", "full", "layers"]), default="auto", show_default=True)
@click.option("--offline", is_flag=True, help="Use what is in the local Hugging Face cache alone.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
def command(
    bundle: Path,
    drafter: str,
    block_sizes: tuple[int, ...],
    template_args: tuple[str, ...],
    backend: str,
    gate: str,
    offline: bool,
    as_json: bool,
) -> None:
    """Adds DRAFTER (catalog name, Hugging Face id, or folder) to BUNDLE without tracing the target again.

    Where the drafter wants other layers than the bundle taps, the target's graph is edited.
    """
    arguments = read_template_args(template_args)
    with needs_extra("export"):
        from dflash_tools.pipeline import add_drafter
    with ProgressLine() as progress:
        report = add_drafter(
            bundle,
            drafter,
            backend,
            progress,
            block_sizes=block_sizes,
            template_args=arguments or None,
            gate=gate,
            local_files_only=offline,
        )
    print_report(report, as_json=as_json)

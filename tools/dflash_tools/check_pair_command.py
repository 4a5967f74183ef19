"""`dflash-export check-pair`: does a drafter fit a target, and what would only show as low acceptance?"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import click

from dflash_tools.error_lines import DFlashCommand, needs_extra
from dflash_tools.option_values import read_template_args

if TYPE_CHECKING:
    from dflash_export.pair_report import PairReport

EXIT_CODES = {"error": 1, "warning": 3, "note": 0, None: 0}
"""2 is click's own code for a wrong command line."""


@click.command("check-pair", cls=DFlashCommand, short_help="Say whether a drafter fits a target.")
@click.argument("target")
@click.argument("drafter", required=False)
@click.option("--block-size", "block_sizes", type=int, multiple=True, metavar="N", help="Block size to be used too.")
@click.option("--max-context", type=int, metavar="N", help="Context to be used.")
@click.option(
    "--template-arg", "template_args", multiple=True, metavar="KEY=VALUE", help="Template argument to be used."
)
@click.option("--offline", is_flag=True, help="Use what is in the local Hugging Face cache alone.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(
    ctx: click.Context,
    target: str,
    drafter: str | None,
    block_sizes: tuple[int, ...],
    max_context: int | None,
    template_args: tuple[str, ...],
    offline: bool,
    as_json: bool,
) -> None:
    """Compares DRAFTER with TARGET (catalog names, Hugging Face ids, folders) before anything is built.

    Looks for what makes a pair fail, and for what would only show as few accepted proposals: tokenizers, mask id,
    taps, window, rope, thinking mode, vocabulary, revisions. Weights on the hub are not fetched, but for a drafter
    with a vocabulary of its own. `build` does the same and stops at errors.

    Exit code 0: it fits. 1: it cannot work. 3: it works, and acceptance probably suffers.
    """
    arguments = read_template_args(template_args)
    with needs_extra("export"):
        from dflash_export.pair_report import examine_pair
    report = examine_pair(
        target,
        drafter,
        block_sizes=block_sizes,
        max_context_tokens=max_context,
        template_args=arguments,
        local_files_only=offline,
    )
    if as_json:
        click.echo(json.dumps(_facts(report), ensure_ascii=False))
    else:
        for line in _lines(report):
            click.echo(line)
    ctx.exit(EXIT_CODES[report.worst])


def _facts(report: PairReport) -> dict[str, Any]:
    return {
        "fits": report.worst != "error",
        "worst": report.worst,
        "target": report.target,
        "drafter": report.drafter,
        "findings": [dataclasses.asdict(one) for one in report.findings],
    }


def _lines(report: PairReport) -> list[str]:
    target, drafter = report.target, report.drafter
    lines = [f"{'target':<10}{_source(target)}"]
    if "num_layers" in target:
        lines.append(
            f"{'':<10}{target['model_type']}, {target['num_layers']} layers, width {target['hidden_size']}, "
            f"{target['vocab_size']} tokens"
        )
    lines.append(f"{'drafter':<10}{_source(drafter)}")
    if "layout" in drafter:
        lines += _drafter_lines(drafter)
    for finding in report.findings:
        lines.append("")
        lines.append(f"{finding.severity:<10}{finding.subject}: {finding.text}")
        lines += [f"{'':<10}{part}" for part in (finding.consequence, finding.remedy) if part]
    verdict = {"error": "This pair cannot work.", "warning": "This pair works; acceptance probably suffers."}
    return [*lines, "", verdict.get(report.worst or "", "This pair fits.")]


def _drafter_lines(drafter: dict[str, Any]) -> list[str]:
    vocabulary = drafter["draft_vocab_size"]
    described = (
        f"{drafter['architecture']} in {drafter['layout']} layout, {drafter['num_layers']} layers, block size "
        f"{drafter['block_size']} (the anchor and {drafter['num_draft_tokens']} proposals)"
    )
    taps = f"taps the outputs of layers {drafter['target_layer_ids']}, mask id {drafter['mask_token_id']}"
    reduced = [] if vocabulary is None else [f"proposes from {vocabulary} tokens"]
    return [f"{'':<10}{part}" for part in (described, taps, *reduced, *drafter["notes"])]


def _source(facts: dict[str, Any]) -> str:
    revision = facts["revision"]
    return facts["id"] if revision is None else f"{facts['id']}@{revision}"

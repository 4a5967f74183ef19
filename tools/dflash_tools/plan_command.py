"""`dflash-export plan`: what a pair will take on a device, before anything is downloaded or built."""

from __future__ import annotations

import json

import click

from dflash_tools.device_table import find_device
from dflash_tools.error_lines import DFlashCommand
from dflash_tools.plan_options import NEWEST_TENSORRT, settle_options
from dflash_tools.plan_proposals import propose
from dflash_tools.plan_report import plan_facts, plan_lines
from dflash_tools.plan_sources import find_pair
from dflash_tools.quantization_options import quantization_options
from dflash_tools.resource_plan import Place, make_plan, place_on
from dflash_tools.this_device import find_this_device


@click.command("plan", cls=DFlashCommand, short_help="Say what a pair takes on a device, before any work.")
@click.option("--target", required=True, help="Folder with config.json, bundle, catalog name, or Hugging Face id.")
@click.option("--drafter", help="The same for the drafter. [default: the catalog's, else five layers are assumed]")
@click.option("--device", required=True, metavar="NAME|auto", help="A board or card, as orin-nano-8gb; auto: this one.")
@click.option(
    "--precision",
    type=click.Choice(["fp16", "bf16", "int8", "int4", "fp8"]),
    help="Of the target's layers; below 16 bit as build --quantize stores them. [default: the checkpoint's, or fp16]",
)
@quantization_options
@click.option(
    "--max-context", type=int, metavar="N", help="Most tokens a request may hold. [default: 4096, or the model's limit]"
)
@click.option(
    "--block-size",
    "block_sizes",
    type=int,
    multiple=True,
    metavar="N",
    help="Block size, anchor included; repeatable. [default: the drafter's own and smaller ones]",
)
@click.option(
    "--tensorrt", default=NEWEST_TENSORRT, show_default=True, metavar="VERSION",
    help="Which the device has: before 10.15 attention is in primitive operators, as 10.3 of JetPack 6.2.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    target: str,
    drafter: str | None,
    device: str,
    precision: str | None,
    quantize_head: str,
    quantize_drafter: str,
    group_size: str,
    asymmetric: bool,
    max_context: int | None,
    block_sizes: tuple[int, ...],
    tensorrt: str,
    as_json: bool,
) -> None:
    """Says from config files alone what TARGET and DRAFTER take on a device, and whether that fits.

    Weights and caches are exact; everything else, times included, is a prediction and labelled so. Of a Hugging Face
    id config.json alone is fetched. A checkpoint that is quantised already is counted as it is, other weights as
    `build` would store them. Where the pair does not fit, what would fit is proposed.
    """
    place = _place(device)
    pair = find_pair(target, drafter)
    options = settle_options(
        pair, precision, quantize_head, max_context, block_sizes, quantize_drafter, int(group_size),
        not asymmetric, tensorrt,
    )  # fmt: skip
    plan = make_plan(pair, place, options)
    proposals = propose(plan)
    if as_json:
        click.echo(json.dumps(plan_facts(plan, proposals), ensure_ascii=False))
        return
    for line in plan_lines(plan, proposals):
        click.echo(line)


def _place(device: str) -> Place:
    if device.lower() != "auto":
        return place_on(find_device(device))
    found = find_this_device()
    # What the system uses already is not free, so nothing more is kept for it.
    return Place(found.device, found.free_bytes, found.measured_by, system_bytes=0)

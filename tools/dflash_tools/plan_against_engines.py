"""What `plan` says of Qwen2-7B in int4 on two boards, against the bundle and the engines it really becomes (Linux).

    python -m dflash_tools.plan_against_engines              # 28 layers: 14 GB of memory, 24 GB of disk in --scratch
    python -m dflash_tools.plan_against_engines --layers 1 --drafter-layers 1

The checkpoints have the true layout and hold noise. They are planned from their configs, stored in int4 and built into
TensorRT-RTX engines, which needs no GPU; the sum of weights on the device, caches and engines must be within 3 % of
what the plan says, exit code 1 where it is not. TensorRT-RTX has no kernels for a board's own GPU, so the engines are
for the one nearest to it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from dflash_runtime.bundle import Bundle
from dflash_runtime.device_engine import DeviceEngineRecord
from dflash_tools.device_table import find_device
from dflash_tools.engine_memory import QWEN2_7B
from dflash_tools.error_lines import EXIT_REFUSED, DFlashCommand, needs_extra
from dflash_tools.plan_against_measured import TOLERANCE, Comparison, compare_engines, comparison_lines
from dflash_tools.plan_options import settle_options
from dflash_tools.plan_report import verdict
from dflash_tools.plan_sources import find_pair
from dflash_tools.progress import ProgressLine
from dflash_tools.random_drafter import drafter_config, drafter_shapes
from dflash_tools.random_weights import write_random_safetensors
from dflash_tools.resource_plan import Plan, make_plan, place_on
from dflash_tools.sparse_checkpoint import write_sparse_checkpoint
from dflash_tools.tensorrt_report import report_lines

BOARDS = ("orin-nano-8gb", "orin-nx-16gb")
COMPARED = ("target weights", "drafter weights", "target KV cache", "drafter KV cache", "engines")
"""Items of a plan whose sum is what a bundle and its engines take; the others are the system's, or pass."""
Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is planned and built, in int4 but for the embedding."""

    drafter_layers: int = 5
    quantize_drafter: str = "int4"
    group_size: int = 128
    block_size: int = 16
    max_context_tokens: int = 4096
    compute_capability: str = "8.6"


def write_pair(folder: Path, target: Mapping[str, Any], asked: Asked) -> None:
    """Checkpoints of a Qwen2 and of a drafter of its width in `folder`, all noise: equal weights might be merged."""
    write_sparse_checkpoint(folder / "target", target, range(target["num_hidden_layers"]))
    config = drafter_config(dict(target), asked.drafter_layers, asked.block_size, None) | {"dtype": "bfloat16"}
    (folder / "drafter").mkdir()
    write_random_safetensors(folder / "drafter" / "model.safetensors", drafter_shapes(config), "BF16", seed=1)
    (folder / "drafter" / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def plans_of(folder: Path, asked: Asked) -> list[Plan]:
    """What `plan` says of the checkpoints for each board."""
    pair = find_pair(str(folder / "target"), str(folder / "drafter"))
    options = settle_options(
        pair, "int4", "int4", asked.max_context_tokens, (asked.block_size,), asked.quantize_drafter, asked.group_size
    )
    return [make_plan(pair, place_on(find_device(name)), options) for name in BOARDS]


def export_pair(folder: Path, asked: Asked, tell: Progress) -> Bundle:
    """The pair as a bundle, without a gate; the checkpoints' weights are not kept, to spare the disk."""
    from dflash_export.build import export_bundle
    from dflash_export.build_plan import BuildOptions, plan_build
    from dflash_export.quantization import quantize_options

    options = BuildOptions(
        str(folder / "target"), str(folder / "drafter"), precision="bf16", block_sizes=(asked.block_size,),
        max_context_tokens=asked.max_context_tokens,
        quantize=quantize_options("int4", "int4", asked.quantize_drafter, asked.group_size),
    )  # fmt: skip
    (folder / "bundle").mkdir()
    export_bundle(plan_build(options), folder / "bundle", tell)
    for weights in folder.glob("*/*.safetensors"):
        weights.unlink()
    return Bundle.open(folder / "bundle")


def compare_plan(plan: Plan, bundle: Bundle, record: DeviceEngineRecord) -> list[Comparison]:
    """The items and the sum, of which only the sum is judged."""
    rows = [
        dataclasses.replace(row, judged=False)
        for row in compare_engines(bundle, plan.pair.target, plan.pair.drafter, record)
    ]
    planned = sum(item.size_bytes for item in plan.run_items if item.name in COMPARED)
    return [*rows[:-1], Comparison("what plan says of them", planned, rows[-1].real_bytes, True)]


@click.command(cls=DFlashCommand)
@click.option("--layers", type=click.IntRange(1), default=28, show_default=True, help="Of the target.")
@click.option("--drafter-layers", type=click.IntRange(1), default=5, show_default=True)
@click.option("--quantize-drafter", type=click.Choice(["keep", "int4"]), default="int4", show_default=True)
@click.option("--group-size", type=click.Choice(["32", "64", "128"]), default="128", show_default=True)
@click.option("--block-size", type=click.IntRange(2), default=16, show_default=True, help="Anchor included.")
@click.option("--max-context", type=click.IntRange(1), default=4096, show_default=True)
@click.option("--compute-capability", default="8.6", show_default=True)
@click.option("--scratch", type=click.Path(path_type=Path), default=Path(), help="Where to work. [default: here]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    layers: int, drafter_layers: int, quantize_drafter: str, group_size: str, block_size: int, max_context: int,
    compute_capability: str, scratch: Path, as_json: bool,
) -> None:  # fmt: skip
    """Plans, builds and compares a 7 B target and its drafter in int4."""
    with needs_extra("export"):
        import dflash_export.build  # noqa: F401
    with needs_extra("tensorrt-rtx"):
        from dflash_engines.tensorrt_engines import build_engines
        from dflash_engines.tensorrt_plan import EngineOptions
    asked = Asked(drafter_layers, quantize_drafter, int(group_size), block_size, max_context, compute_capability)
    with tempfile.TemporaryDirectory(prefix="dflash-plan-", dir=scratch.resolve()) as made, ProgressLine() as progress:
        folder = Path(made)
        progress("write checkpoints", 0, 1)
        write_pair(folder, {**QWEN2_7B, "num_hidden_layers": layers}, asked)
        plans = plans_of(folder, asked)
        bundle = export_pair(folder, asked, progress)
        options = EngineOptions("tensorrt-rtx", compute_capability, (block_size,), use_cache=False)
        built = build_engines(bundle, options, progress)
        rows = compare_plan(plans[0], bundle, built.record)
    if as_json:
        facts = [{**dataclasses.asdict(row), "difference": row.difference, "passed": row.passed} for row in rows]
        told = {plan.place.device.name: {"run_bytes": plan.run_bytes, "build_bytes": plan.build_bytes,
                                         "available_bytes": plan.place.available_bytes, "fits": plan.fits}
                for plan in plans}  # fmt: skip
        click.echo(json.dumps({"tolerance": TOLERANCE, "items": facts, "plans": told, "build_s": built.seconds,
                               "build_peak_bytes": built.build_peak_bytes}))  # fmt: skip
    else:
        for line in (*_board_lines(plans), *report_lines(built), *comparison_lines(rows)):
            click.echo(line)
    if not all(row.passed for row in rows):
        sys.exit(EXIT_REFUSED)


def _board_lines(plans: list[Plan]) -> Iterator[str]:
    for plan in plans:
        yield f"{plan.place.device.name}: {verdict(plan)}"


if __name__ == "__main__":
    main()

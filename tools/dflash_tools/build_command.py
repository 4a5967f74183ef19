"""`dflash-export build`: checkpoints to a checked bundle with engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dflash_tools.build_report import print_report
from dflash_tools.engine_options import (
    TENSORRT,
    engine_builder,
    engine_orders,
    given_tensorrt_options,
    tensorrt_options,
)
from dflash_tools.error_lines import DFlashCommand, needs_extra
from dflash_tools.option_values import read_template_args
from dflash_tools.progress import ProgressLine
from dflash_tools.quantization_options import quantization_options


@click.command("build", cls=DFlashCommand, short_help="Export checkpoints into a checked bundle.")
@click.option("--target", required=True, help="Catalog name, Hugging Face id (a revision after @), or folder.")
@click.option("--drafter", help="The same for the drafter. [default: the catalog's; without one, the target alone]")
@click.option("--out", type=click.Path(path_type=Path), help="Folder to make. [default: ./NAME-dflash]")
@click.option(
    "--precision", type=click.Choice(["fp32", "fp16", "bf16"]), help="Of the weights. [default: the checkpoint's own]"
)
@click.option(
    "--quantize",
    type=click.Choice(["keep", "int8", "int4", "fp8"]),
    default="keep",
    show_default=True,
    help="Round the matrices of the target's layers: int8, fp8 with a scale a channel; int4 with one a group.",
)
@quantization_options
@click.option(
    "--block-size",
    "block_sizes",
    type=int,
    multiple=True,
    metavar="N",
    help="Block size to make engines for, anchor included; repeatable. [default: the drafter's own and smaller ones]",
)
@click.option(
    "--max-context", type=int, metavar="N", help="Most tokens a request may hold. [default: 4096, or the model's limit]"
)
@click.option(
    "--template-arg",
    "template_args",
    multiple=True,
    metavar="KEY=VALUE",
    help="Argument the chat template gets by default; repeatable. [default: what the drafter was trained with]",
)
@click.option(
    "--backend",
    type=click.Choice(["ort-cpu", "ort-cuda", *TENSORRT, "none"]),
    default="ort-cpu",
    show_default=True,
    help="What to make engines for; those of a GPU come on top of ort-cpu's graphs.",
)
@tensorrt_options
@click.option(
    "--gate",
    type=click.Choice(["auto", "full", "layers"]),
    default="auto",
    show_default=True,
    help="Compare the whole model with PyTorch, or layer by layer, which takes little memory; auto decides by size.",
)
@click.option(
    "--weights-copy",
    type=click.Choice(["auto", "link", "copy"]),
    default="auto",
    show_default=True,
    help="auto: the bundle shares the checkpoint's files where it can; link: by hard links, or stop; copy: never.",
)
@click.option("--offline", is_flag=True, help="Use what is in the local Hugging Face cache alone.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
def command(
    target: str,
    drafter: str | None,
    out: Path | None,
    precision: str | None,
    quantize: str,
    quantize_head: str,
    quantize_drafter: str,
    group_size: str,
    asymmetric: bool,
    block_sizes: tuple[int, ...],
    max_context: int | None,
    template_args: tuple[str, ...],
    backend: str,
    gate: str,
    weights_copy: str,
    offline: bool,
    as_json: bool,
    **engine_values: Any,
) -> None:
    """Exports TARGET, and DRAFTER where there is one, into a bundle, and checks every step against PyTorch.

    The bundle appears when everything is checked, or not at all; it replaces an older bundle in its place, and
    nothing else. A build that was killed goes on when it is started again.
    """
    arguments = read_template_args(template_args)
    with needs_extra("export"):
        from dflash_export.build_plan import BuildOptions
        from dflash_export.quantization import quantize_options
        from dflash_tools.pipeline import build
    options = BuildOptions(
        target=target,
        drafter=drafter,
        precision=precision,
        block_sizes=block_sizes,
        max_context_tokens=max_context,
        template_args=arguments,
        gate=gate,
        weights_copy=weights_copy,
        local_files_only=offline,
        quantize=quantize_options(
            quantize, quantize_head, quantize_drafter, int(group_size), symmetric=not asymmetric
        ),
    )
    given = given_tensorrt_options(engine_values)
    if given and backend not in TENSORRT:
        raise click.UsageError(f"{', '.join(given)}: for TensorRT only.")
    engines: dict[str, Any] = {}
    if backend in TENSORRT:
        with needs_extra(backend):
            orders = engine_orders(backend, engine_values, (), None)
            engines = {"engine_options": orders, "build_engine": engine_builder(engine_values)}
    lowered = backend if backend in ("ort-cpu", "none") else "ort-cpu"
    with ProgressLine() as progress:
        report = build(
            options, out or default_folder(target), lowered, progress, for_cuda=backend == "ort-cuda", **engines
        )
    print_report(report, as_json=as_json)


def default_folder(target: str) -> Path:
    """`NAME-dflash` in the working directory, NAME being the last part of what the user called the target."""
    name = target.partition("@")[0]
    path = Path(name)
    return Path(f"{path.resolve().name if path.is_dir() else path.name}-dflash")

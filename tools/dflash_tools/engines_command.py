"""`dflash-export engines`: lowers a bundle's graphs for a backend, or builds its TensorRT engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from dflash_runtime.bundle import Bundle
from dflash_runtime.engine_record import EngineRecord, engine_folder
from dflash_tools.engine_options import (
    TENSORRT,
    engine_builder,
    engine_orders,
    given_tensorrt_options,
    tensorrt_options,
)
from dflash_tools.error_lines import DFlashCommand, needs_extra
from dflash_tools.progress import ProgressLine
from dflash_tools.ring_lines import ring_lines
from dflash_tools.sizes import bytes_text
from dflash_tools.tensorrt_report import report_json, report_lines

_ORT = ("ort-cpu", "ort-cuda")


@click.command("engines", cls=DFlashCommand, short_help="Lower a bundle's graphs, or build TensorRT engines.")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--backend", type=click.Choice([*_ORT, *TENSORRT]), default="ort-cpu", show_default=True)
@click.option("--block-size", "block_sizes", type=click.IntRange(2), multiple=True,
              help="TensorRT: a block size, anchor included; several may be given. Default: those of the bundle.")
@click.option("--precision", type=click.Choice(["fp16", "bf16"]),
              help="TensorRT and ort-cuda: what is computed in. Default: the bundle's precision.")
@tensorrt_options
@click.option("--activations", type=click.Choice(["int8", "fp32"]),
              help="ort-cpu, quantised weights: what their products round activations to. Default: int8.")
@click.option("--draft-window", "draft_window", type=click.IntRange(1), metavar="N",
              help="Drafter layers that see the whole context see its last N tokens. Other proposals, the same text, "
              "memory that does not grow with the context.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(bundle: Path, backend: str, as_json: bool, **options: Any) -> None:
    """Makes what a backend executes from BUNDLE's portable graphs. Needs neither torch nor Transformers.

    ort-cpu: graphs for ONNX Runtime. ort-cuda: graphs for its CUDA provider, in fp16 or bf16. tensorrt, tensorrt-rtx:
    engines without weights and with static shapes, one profile per block size; TensorRT-RTX builds them on machines
    without a GPU too.
    """
    opened = Bundle.open(bundle)
    if options["activations"] is not None and (backend != "ort-cpu" or not opened.manifest.quantized):
        raise click.UsageError("--activations is for ort-cpu and bundles with quantised weights.")
    if backend in TENSORRT:
        _build_tensorrt(opened, backend, options, as_json)
        return
    _refuse_tensorrt_options(backend, options)
    with needs_extra("engines"):
        from dflash_engines import ort_cpu, ort_cuda
        from dflash_engines.fp16_graphs import fp16_warnings
    record: EngineRecord
    warnings = list[str]()
    if backend == "ort-cuda":
        record = ort_cuda.lower_bundle(opened.path, options["precision"], draft_window_tokens=options["draft_window"])
        warnings = fp16_warnings(opened, record.execution_precision)
    else:
        record = ort_cpu.lower_bundle(
            opened.path, activations=options["activations"] or ort_cpu.DEFAULT_ACTIVATIONS,
            draft_window_tokens=options["draft_window"],
        )  # fmt: skip
    folder = engine_folder(opened, backend)
    if as_json:
        sizes = {name: facts.size_bytes for name, facts in record.files.items()}
        click.echo(json.dumps({"backend": backend, "path": str(folder), "file_bytes": sizes, "warnings": warnings}))
        return
    size = sum(facts.size_bytes for facts in record.files.values())
    click.echo(f"Lowered {len(record.files)} graphs for {backend} into {folder} ({bytes_text(size)}).")
    click.echo(f"They execute in {record.execution_precision}, on the weights of the bundle.")
    for line in ring_lines(record):
        click.echo(line)
    for warning in warnings:
        click.echo(f"Warning: {warning}")


def _refuse_tensorrt_options(backend: str, options: dict[str, Any]) -> None:
    given = given_tensorrt_options(options)
    given += ["--block-size"] if options["block_sizes"] else []
    given += ["--precision"] if backend == "ort-cpu" and options["precision"] is not None else []
    if given:
        precision = "fp32" if backend == "ort-cpu" else "fp16 or bf16"
        raise click.UsageError(f"{', '.join(given)}: for TensorRT; {backend} takes any block size, in {precision}.")


def _build_tensorrt(bundle: Bundle, backend: str, options: dict[str, Any], as_json: bool) -> None:
    results = []
    with needs_extra(backend):
        build = engine_builder(options)
        orders = engine_orders(backend, options, options["block_sizes"], options["precision"], options["draft_window"])
    for order in orders:
        with ProgressLine() as progress:
            results.append(build(bundle, order, progress))
    if as_json:
        click.echo(json.dumps({"engines": [report_json(result) for result in results]}))
        return
    for result in results:
        for line in report_lines(result):
            click.echo(line)

"""`dflash-export engines`: lowers a bundle's graphs for a backend, or builds its TensorRT engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from dflash_runtime.bundle import Bundle
from dflash_runtime.engine_record import EngineRecord, engine_folder
from dflash_tools.error_lines import DFlashCommand, needs_extra
from dflash_tools.option_values import MEMORY_SIZE
from dflash_tools.progress import ProgressLine
from dflash_tools.sizes import bytes_text
from dflash_tools.tensorrt_report import report_json, report_lines

_TENSORRT = ("tensorrt", "tensorrt-rtx")
_ORT = ("ort-cpu", "ort-cuda")


@click.command("engines", cls=DFlashCommand, short_help="Lower a bundle's graphs, or build TensorRT engines.")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--backend", type=click.Choice([*_ORT, *_TENSORRT]), default="ort-cpu", show_default=True)
@click.option("--block-size", "block_sizes", type=click.IntRange(2), multiple=True,
              help="TensorRT: a block size, anchor included; several may be given. Default: those of the bundle.")
@click.option("--prefill-chunk", type=click.IntRange(1), default=128, show_default=True,
              help="TensorRT: prompt tokens in one call.")
@click.option("--weights", type=click.Choice(["auto", "shared", "embedded"]), default="auto", show_default=True,
              help="TensorRT: one copy of the weights for all engines, or one in each engine; auto measures both "
              "where the GPU is at hand, and takes shared elsewhere.")
@click.option("--precision", type=click.Choice(["fp16", "bf16"]),
              help="TensorRT and ort-cuda: what is computed in. Default: the bundle's precision.")
@click.option("--fp32-residuals", is_flag=True, help="TensorRT: sum in fp32 what layers add, in fp16 and bf16 engines.")
@click.option("--compute-capability", "capabilities", multiple=True, metavar="X.Y",
              help="TensorRT-RTX: build for this kind of GPU, as 8.9; may be repeated. Default: the GPU here.")
@click.option("--max-build-memory", type=MEMORY_SIZE, help="TensorRT: stop a build that takes more memory, as 2GB.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(bundle: Path, backend: str, as_json: bool, capabilities: tuple[str, ...], **options: Any) -> None:
    """Makes what a backend executes from BUNDLE's portable graphs. Needs neither torch nor Transformers.

    ort-cpu: graphs for ONNX Runtime. ort-cuda: graphs for its CUDA provider, in fp16 or bf16. tensorrt, tensorrt-rtx:
    engines without weights and with static shapes, one profile per block size; TensorRT-RTX builds them on machines
    without a GPU too.
    """
    opened = Bundle.open(bundle)
    if backend in _TENSORRT:
        _build_tensorrt(opened, backend, capabilities, options, as_json)
        return
    _refuse_tensorrt_options(backend, capabilities, options)
    with needs_extra("engines"):
        from dflash_engines import ort_cpu, ort_cuda
    record: EngineRecord
    if backend == "ort-cuda":
        record = ort_cuda.lower_bundle(opened.path, options["precision"])
    else:
        record = ort_cpu.lower_bundle(opened.path)
    folder = engine_folder(opened, backend)
    if as_json:
        sizes = {name: facts.size_bytes for name, facts in record.files.items()}
        click.echo(json.dumps({"backend": backend, "path": str(folder), "file_bytes": sizes}))
        return
    size = sum(facts.size_bytes for facts in record.files.values())
    click.echo(f"Lowered {len(record.files)} graphs for {backend} into {folder} ({bytes_text(size)}).")
    click.echo(f"They execute in {record.execution_precision}, on the weights of the bundle.")


def _refuse_tensorrt_options(backend: str, capabilities: tuple[str, ...], options: dict[str, Any]) -> None:
    given = ["--compute-capability"] if capabilities else []
    given += ["--block-size"] if options["block_sizes"] else []
    given += ["--fp32-residuals"] if options["fp32_residuals"] else []
    names = ["max_build_memory"] if backend == "ort-cuda" else ["precision", "max_build_memory"]
    given += [f"--{name.replace('_', '-')}" for name in names if options[name] is not None]
    if given:
        precision = "fp32" if backend == "ort-cpu" else "fp16 or bf16"
        raise click.UsageError(f"{', '.join(given)}: for TensorRT; {backend} takes any block size, in {precision}.")


def _build_tensorrt(
    bundle: Bundle, backend: str, capabilities: tuple[str, ...], options: dict[str, Any], as_json: bool
) -> None:
    with needs_extra(backend):
        from dflash_engines.tensorrt_engines import build_engines
        from dflash_engines.tensorrt_plan import EngineOptions
        from dflash_tools.weights_choice import build_faster
    mode = options["weights"]
    results = []
    for capability in capabilities or (None,):
        wanted = EngineOptions(
            backend=backend,
            compute_capability=capability,
            block_sizes=options["block_sizes"],
            prefill_chunk_tokens=options["prefill_chunk"],
            weights_mode="shared" if mode == "auto" else mode,
            precision=options["precision"],
            fp32_residuals=options["fp32_residuals"],
            max_build_memory_bytes=options["max_build_memory"],
        )
        with ProgressLine() as progress:
            results.append((build_faster if mode == "auto" else build_engines)(bundle, wanted, progress))
    if as_json:
        click.echo(json.dumps({"engines": [report_json(result) for result in results]}))
        return
    for result in results:
        for line in report_lines(result):
            click.echo(line)

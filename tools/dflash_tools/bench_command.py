"""`dflash-export bench`: plain decoding, every block size and peers, in turn, with the spread."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import sys
import tempfile
from pathlib import Path

import click

from dflash_runtime.backend import AVAILABLE
from dflash_runtime.bundle import write_atomically
from dflash_runtime.errors import OutputError
from dflash_tools.bench_page import page
from dflash_tools.bench_report import headline, terminal_lines
from dflash_tools.bench_run import BenchOptions, run_bench
from dflash_tools.error_lines import DFlashCommand
from dflash_tools.option_values import read_template_args
from dflash_tools.progress import ProgressLine


@click.command("bench", cls=DFlashCommand, short_help="Measure plain decoding, block sizes and peers in turn.")
@click.argument("bundles", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="BUNDLE...")
@click.option(
    "--prompts",
    default="reference",
    show_default=True,
    metavar="SET|FILE",
    help="reference, gsm8k, humaneval, math500, mt-bench, SET=FILE for a set's rows in a JSONL file, or a file of "
    "prompts (JSONL or .txt, one a line).",
)
@click.option("--num-prompts", type=click.IntRange(1), default=8, show_default=True)
@click.option("--max-new-tokens", type=click.IntRange(2), default=128, show_default=True)
@click.option("--block-size", "block_sizes", type=click.IntRange(2), multiple=True, help="Repeatable. [default: all]")
@click.option("--context", "contexts", type=click.IntRange(1), multiple=True, help="Length in tokens; repeatable.")
@click.option(
    "--scripted-acceptance",
    "scripted",
    type=click.IntRange(1),
    multiple=True,
    metavar="N",
    help="Also make every round of the largest block commit N tokens, whatever is proposed; repeatable.",
)
@click.option("--backend", type=click.Choice(AVAILABLE), default="ort-cpu", show_default=True)
@click.option("--threads", type=click.IntRange(1), help="CPU threads of every engine. [default: each chooses]")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Processes of each engine.")
@click.option("--against", multiple=True, metavar="transformers|dflash|genai|openai:URL[#MODEL]", help="Repeatable.")
@click.option("--model", help="The target's checkpoint for peers. [default: where the bundle says it lay]")
@click.option("--drafter", help="The same for its drafter.")
@click.option("--genai-folder", type=click.Path(path_type=Path), help="What its builder made. [default: make it now]")
@click.option("--thinking", type=click.Choice(["on", "off"]), help="[default: as the pair was trained]")
@click.option("--template-arg", "template_args", multiple=True, metavar="KEY=VALUE", help="Repeatable.")
@click.option("--raw", is_flag=True, help="Texts go in as they are, without the chat template.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write the result as JSON.")
@click.option("--html", "html_file", type=click.Path(path_type=Path), metavar="FILE", help="Write a page with plots.")
def command(
    bundles: tuple[Path, ...], prompts: str, num_prompts: int, max_new_tokens: int, block_sizes: tuple[int, ...],
    contexts: tuple[int, ...], scripted: tuple[int, ...], backend: str, threads: int | None, rounds: int,
    against: tuple[str, ...], model: str | None, drafter: str | None, genai_folder: Path | None, thinking: str | None,
    template_args: tuple[str, ...], raw: bool, json_file: Path | None, html_file: Path | None,
) -> None:  # fmt: skip
    """Measures BUNDLE: plain decoding, every block size, and peers, on the same prompts.

    Every engine runs in a process of its own, once a round, in turn, so that a machine that slows down slows all of
    them. Speeds are medians over the rounds; a result is called a speedup only where the whole 95 % interval over the
    rounds lies above 1. Needs at least 3 rounds for that. Close other programs first.
    """
    options = BenchOptions(
        prompts=prompts, num_prompts=num_prompts, max_new_tokens=max_new_tokens, block_sizes=block_sizes,
        contexts=contexts, scripted=scripted, backend=backend, threads=threads, rounds=rounds, against=against,
        model=model, drafter=drafter, genai_folder=genai_folder, thinking=thinking,
        template_args=read_template_args(template_args), raw=raw,
        command=shlex.join(["dflash-export", *sys.argv[1:]]),
        tool_version=importlib.metadata.version("dflash-export"),
    )  # fmt: skip
    for file in (json_file, html_file):
        if file is not None and not file.absolute().parent.is_dir():
            raise OutputError(f"{file.absolute().parent} is not a folder, so {file.name} cannot be written there.")
    reports = []
    for bundle in bundles:
        with tempfile.TemporaryDirectory(prefix="dflash-bench-") as scratch, ProgressLine() as progress:
            report = run_bench(bundle, options, Path(scratch), progress)
        reports.append(report)
        for line in terminal_lines(report):
            click.echo(line)
        click.echo(f"\n{headline(report)}")
    if json_file is not None:
        told = [report.to_json() for report in reports]
        write_atomically(json_file, json.dumps(told, ensure_ascii=False, indent=1) + "\n")
    if html_file is not None:
        write_atomically(html_file, page(reports))

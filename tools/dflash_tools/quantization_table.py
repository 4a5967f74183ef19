"""What quantisation costs and brings on a CPU, in one run: size, perplexity, acceptance length and speed.

    pip install onnxruntime-genai
    python -m dflash_tools.quantization_table --model FOLDER --drafter DRAFTER --work FOLDER --threads 2

The bundles are built with `dflash-export build` where the work folder does not hold them yet: fp32, then int8 and int4
for layers, head and drafter. Every time is that of a process of its own, and the engines take turns, see `speed_plain`.
What is printed is a table in Markdown.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from dflash_runtime.bundle import Bundle
from dflash_tools.bench_prompts import REFERENCE, find_prompts
from dflash_tools.error_lines import DFlashCommand, needs_extra
from dflash_tools.genai_model import convert
from dflash_tools.progress import ProgressLine
from dflash_tools.quantization_bundles import KINDS, Quality, build_bundle, measure_quality, weight_bytes
from dflash_tools.sizes import bytes_text
from dflash_tools.speed_plain import measure_in_a_process

_GENAI_INT4 = "onnxruntime-genai int4"
_GENAI = {"onnxruntime-genai fp32": "fp32", _GENAI_INT4: "int4"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One engine."""

    name: str
    size_bytes: int
    """Weights of a bundle, the drafter's included; all files of onnxruntime-genai's folder."""
    ms_per_token: float
    """Plain greedy decoding: the median over processes."""
    quartiles_ms: tuple[float, float]
    quality: Quality | None
    """None for onnxruntime-genai."""


@click.command(cls=DFlashCommand)
@click.option("--model", required=True, type=click.Path(path_type=Path), help="The target's checkpoint folder.")
@click.option("--drafter", help="Its drafter, as `build` takes it.")
@click.option("--work", required=True, type=click.Path(path_type=Path), help="Folder for bundles; they stay there.")
@click.option("--kind", "kinds", type=click.Choice(list(KINDS)), multiple=True, help="Repeatable. [default: all]")
@click.option("--threads", type=click.IntRange(1), default=os.cpu_count() or 1, show_default="all CPUs")
@click.option("--tokens", type=click.IntRange(2), default=64, show_default=True, help="New tokens a timed decoding.")
@click.option("--rounds", type=click.IntRange(2), default=3, show_default=True, help="Processes of each engine.")
@click.option("--prompts", default=REFERENCE, show_default=True, help="For acceptance, as `bench` takes them.")
@click.option("--num-prompts", type=click.IntRange(1), default=6, show_default=True)
@click.option("--max-new-tokens", type=click.IntRange(1), default=96, show_default=True, help="Of each answer.")
@click.option("--block-size", type=int, metavar="N", help="[default: the drafter's own]")
@click.option("--max-context", type=click.IntRange(1), metavar="N", help="Of the bundles. [default: that of build]")
@click.option("--without-genai", is_flag=True, help="Leave onnxruntime-genai out.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    model: Path, drafter: str | None, work: Path, kinds: tuple[str, ...], threads: int, tokens: int, rounds: int,
    prompts: str, num_prompts: int, max_new_tokens: int, block_size: int | None, max_context: int | None,
    without_genai: bool, as_json: bool,
) -> None:  # fmt: skip
    """Builds fp32, int8 and int4 bundles of one checkpoint and measures them in one run."""
    conversations = find_prompts(prompts, num_prompts).conversations
    bundles = {kind: work / kind for kind in kinds or KINDS}
    peers = {} if without_genai else {name: work / f"genai-{kind}" for name, kind in _GENAI.items()}
    work.mkdir(parents=True, exist_ok=True)
    quality = dict[str, Quality]()
    with ProgressLine() as progress:
        for number, (kind, folder) in enumerate(bundles.items()):
            progress("bundles", number, len(bundles))
            build_bundle(kind, model, drafter, folder, max_context)
        for name, folder in peers.items():
            if not (folder / "genai_config.json").is_file():
                convert(model, folder, work / "genai-cache", _GENAI[name])
        for number, (kind, folder) in enumerate(bundles.items()):
            progress("quality", number, len(bundles))
            with needs_extra("export"):
                quality[kind] = measure_quality(folder, conversations, threads, max_new_tokens, block_size)
        times = {name: list[float]() for name in (*bundles, *peers)}
        for turn in range(rounds):
            progress("decode", turn, rounds)
            for kind, folder in bundles.items():
                times[kind].append(measure_in_a_process("ours", folder, model, threads, tokens)[1])
            for name, folder in peers.items():
                any_bundle = next(iter(bundles.values()))  # whose tokenizer the prompt is put to
                found = measure_in_a_process(f"genai{_ending(name)}", any_bundle, folder, threads, tokens)
                times[name].append(found[1])
    rows = [_row(kind, weight_bytes(Bundle.open(folder)), times[kind], quality[kind])
            for kind, folder in bundles.items()]  # fmt: skip
    rows += [_row(name, _folder_bytes(folder), times[name], None) for name, folder in peers.items()]
    facts = {"threads": threads, "tokens": tokens, "rounds": rounds, "prompts": prompts, "num_prompts": num_prompts,
             "max_new_tokens": max_new_tokens}  # fmt: skip
    if as_json:
        click.echo(json.dumps({**facts, "engines": [dataclasses.asdict(row) for row in rows]}))
        return
    for line in markdown(rows, facts):
        click.echo(line)


def _ending(name: str) -> str:
    return "-int4" if _GENAI[name] == "int4" else ""


def _row(name: str, size_bytes: int, times_ms: list[float], quality: Quality | None) -> Row:
    low, middle, high = statistics.quantiles(times_ms, n=4, method="inclusive")  # never beyond what was measured
    return Row(name, size_bytes, middle, (low, high), quality)


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.name.startswith("model"))


def markdown(rows: list[Row], facts: Mapping[str, Any]) -> list[str]:
    """The table as a README takes it, with what it was measured on.

    Args:
        rows: Engines, that which the others are compared with first.
        facts: Options of the run.
    """
    peer = next((row for row in rows if row.name == _GENAI_INT4), None)
    block = next((row.quality.block_size for row in rows if row.quality is not None), None)
    heads = ["", "weights", "perplexity", "ms a token (quartiles)", "tokens/s", f"speed, {rows[0].name} is 1"]
    heads += [] if peer is None else [f"speed, {peer.name} is 1"]
    heads += ["tokens a round" + (f", block {block}" if block else "")]
    lines = [
        f"{facts['threads']} threads; plain decoding of {facts['tokens']} new tokens, median of {facts['rounds']} "
        f"processes each, in turn; perplexity on the text of the build; rounds over the answers to "
        f"{facts['num_prompts']} prompts of {facts['prompts']}, {facts['max_new_tokens']} new tokens each:",
        "", _line(heads), "|---" * len(heads) + "|",
    ]  # fmt: skip
    for row in rows:
        low, high = row.quartiles_ms
        cells = [row.name, bytes_text(row.size_bytes), "" if row.quality is None else f"{row.quality.perplexity:.2f}"]
        cells += [f"{row.ms_per_token:.2f} ({low:.2f} to {high:.2f})", f"{1000 / row.ms_per_token:.1f}"]
        cells += [f"{one.ms_per_token / row.ms_per_token:.2f}" for one in (rows[0], peer) if one is not None]
        length = None if row.quality is None else row.quality.acceptance_length
        lines.append(_line([*cells, "" if length is None else f"{length:.2f}"]))
    return lines


def _line(cells: list[str]) -> str:
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"


if __name__ == "__main__":
    main()

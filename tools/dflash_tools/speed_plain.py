"""Plain decoding here against Transformers eager and onnxruntime-genai: same model, threads and prompt, one run.

    pip install onnxruntime-genai
    python -m dflash_tools.speed_plain BUNDLE --model FOLDER --threads 2

Every measurement is a process of its own, because where weights come to lie in memory decides more than the engine
does: of two engines in one process, the one opened first was up to 15 % slower. The engines take turns, so that a
machine that slows down slows all of them; reported is the median over the processes, with the quartiles. The prompt
goes on for long: onnxruntime-genai bars stop tokens before the wanted length, the others do not, so where a model would
stop, it says other tokens; the table marks that.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from dflash_runtime import GenerationConfig, Session
from dflash_runtime.bundle import Bundle
from dflash_runtime.errors import DFlashError
from dflash_runtime.tokenizer import Tokenizer
from dflash_tools.error_lines import DFlashCommand, needs_extra
from dflash_tools.genai_model import GenaiModel, convert
from dflash_tools.progress import ProgressLine
from dflash_tools.reference_model import ReferenceModel

OURS = "dflash-export plain"
PROMPT = (
    "Once upon a time, a lighthouse keeper found a letter in a bottle. She sat down on the stairs and began to read:"
)
ENGINES = {
    "ours": OURS,
    "beside": f"{OURS}, --beside",
    "transformers": "transformers eager",
    "genai": "onnxruntime-genai fp32",
    "genai-int4": "onnxruntime-genai int4",
}
REPEATS = 3
"""Decodings in a process after a first one that does not count; their median is the process's time."""

Decode = Callable[[Sequence[int], int], tuple[list[int], float]]


@click.command(cls=DFlashCommand)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--model", required=True, type=click.Path(path_type=Path), help="The target's checkpoint folder.")
@click.option("--threads", type=click.IntRange(1), default=os.cpu_count() or 1, show_default="all CPUs")
@click.option("--tokens", type=click.IntRange(2), default=64, show_default=True, help="New tokens a decoding.")
@click.option("--rounds", type=click.IntRange(2), default=5, show_default=True, help="Processes of each engine.")
@click.option("--without-genai", is_flag=True, help="Leave onnxruntime-genai out.")
@click.option("--beside", type=click.Path(path_type=Path), help="A second bundle, as the same model unquantised.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--only", type=click.Choice(list(ENGINES)), hidden=True, help="Measure one engine in this process.")
def main(
    bundle: Path, model: Path, threads: int, tokens: int, rounds: int, without_genai: bool, beside: Path | None,
    as_json: bool, only: str | None,
) -> None:
    """Measures milliseconds a token of plain greedy decoding, engine by engine; int4 too where the bundle has some."""
    if only is not None:
        said, milliseconds = measure(only, bundle, model, threads, tokens)
        click.echo(json.dumps({"tokens": said, "ms": milliseconds}))
        return
    left_out = set() if beside else {"beside"}
    left_out |= {"genai", "genai-int4"} if without_genai else set()
    left_out |= set() if Bundle.open(bundle).manifest.quantized else {"genai-int4"}
    names = [name for name in ENGINES if name not in left_out]
    with tempfile.TemporaryDirectory(prefix="dflash-speed-") as scratch, ProgressLine() as progress:
        folders = dict.fromkeys(names, model)
        for name in [name for name in names if name.startswith("genai")]:
            progress("convert for onnxruntime-genai", 0, 1)
            folders[name] = Path(scratch) / name
            convert(model, folders[name], Path(scratch) / "cache", "int4" if name == "genai-int4" else "fp32")
        times: dict[str, list[float]] = {name: [] for name in names}
        said_by: dict[str, list[int]] = {}
        for i in range(rounds):
            progress("decode", i, rounds)
            for name in names:
                opened = beside if name == "beside" and beside else bundle
                said_by[name], milliseconds = measure_in_a_process(name, opened, folders[name], threads, tokens)
                times[name].append(milliseconds)
    _report(times, said_by, threads, tokens, as_json)


def measure(name: str, bundle: Path, model: Path, threads: int, tokens: int) -> tuple[list[int], float]:
    """Decodes with one engine in this process: the tokens, and the median of milliseconds a token."""
    tokenizer = Tokenizer.open(Bundle.open(bundle))
    if tokenizer is None:
        raise DFlashError(f"{bundle} has no tokenizer to encode the prompt with.")
    ids = tokenizer.encode_text(PROMPT)
    if name in ("ours", "beside"):
        with Session.open(bundle, threads=threads) as session:
            return _repeat(_plain(session), ids, tokens)
    if name.startswith("genai"):
        return _repeat(GenaiModel(model, threads).timed_decode, ids, tokens)
    with needs_extra("export"):
        reference = ReferenceModel(model, threads)
    return _repeat(reference.timed_decode, ids, tokens)


def _repeat(decode: Decode, ids: Sequence[int], tokens: int) -> tuple[list[int], float]:
    said, _ = decode(ids, tokens)
    return said, statistics.median(decode(ids, tokens)[1] for _ in range(REPEATS))


def measure_in_a_process(
    name: str, bundle: Path, model: Path, threads: int, tokens: int
) -> tuple[list[int], float]:
    """The same as `measure` in a process of its own.

    Raises:
        DFlashError: it failed; its last line is the message.
    """
    argv = [sys.executable, "-m", "dflash_tools.speed_plain", str(bundle), "--model", str(model)]
    argv += ["--threads", str(threads), "--tokens", str(tokens), "--only", name]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise DFlashError(f"Measuring {name} failed: {lines[-1].removeprefix('Error: ')}")
    result = json.loads(done.stdout.splitlines()[-1])
    return list(result["tokens"]), float(result["ms"])


def _report(
    times: dict[str, list[float]], said: dict[str, list[int]], threads: int, tokens: int, as_json: bool
) -> None:
    ours = statistics.median(times["ours"])
    facts: dict[str, dict[str, Any]] = {}
    for name, values in times.items():
        quartiles = statistics.quantiles(values, n=4)
        facts[ENGINES[name]] = {
            "ms_per_token": round(quartiles[1], 2),
            "quartiles_ms": [round(value, 2) for value in (quartiles[0], quartiles[2])],
            "ratio_to_ours": round(quartiles[1] / ours, 3),
            "all_processes_ms": [round(value, 2) for value in values],
            "same_tokens": said[name] == said["ours"][: len(said[name])],
        }
    if as_json:
        click.echo(json.dumps({"threads": threads, "tokens": tokens, "engines": facts}))
        return
    count = len(times["ours"])
    click.echo(f"{threads} threads, {tokens} new tokens, median (and quartiles) of {count} processes each")
    for name, row in facts.items():
        words = "" if row["same_tokens"] else "  (other tokens)"
        low, high = row["quartiles_ms"]
        time_text = f"{row['ms_per_token']:>7} ms/token ({low} to {high})"
        click.echo(f"{name:<24} {time_text}, {row['ratio_to_ours']:.2f} x ours{words}")


def _plain(session: Session) -> Decode:
    def decode(ids: Sequence[int], tokens: int) -> tuple[list[int], float]:
        config = GenerationConfig(max_new_tokens=tokens, plain=True, stop_token_ids=(), reuse_prefix=False)
        result = session.generate(ids, config)
        return result.token_ids, 1000 / result.tokens_per_s

    return decode


if __name__ == "__main__":
    main()

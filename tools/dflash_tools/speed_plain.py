"""Plain decoding here against Transformers eager and onnxruntime-genai: same model, threads and prompt, one run.

    pip install onnxruntime-genai
    python -m dflash_tools.speed_plain BUNDLE --model FOLDER --threads 2

The engines take turns, so that a machine that slows down slows all of them; the median of the rounds is reported.
The prompt goes on for long: onnxruntime-genai bars stop tokens before the wanted length, the others do not, so where
a model would stop, it says other tokens; the table marks that.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from dflash_runtime import GenerationConfig, Session
from dflash_tools.error_lines import DFlashCommand, needs_extra
from dflash_tools.genai_model import GenaiModel, convert
from dflash_tools.progress import ProgressLine
from dflash_tools.reference_model import ReferenceModel

OURS = "dflash-export plain"
PROMPT = (
    "Once upon a time, a lighthouse keeper found a letter in a bottle. She sat down on the stairs and began to read:"
)
REST_S = 0.3
"""Pause between engines, so that spinning threads of the one before have gone to sleep."""

Decode = Callable[[Sequence[int], int], tuple[list[int], float]]


@click.command(cls=DFlashCommand)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--model", required=True, type=click.Path(path_type=Path), help="The target's checkpoint folder.")
@click.option("--threads", type=click.IntRange(1), default=os.cpu_count() or 1, show_default="all CPUs")
@click.option("--tokens", type=click.IntRange(2), default=64, show_default=True, help="New tokens a round.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--without-genai", is_flag=True, help="Leave onnxruntime-genai out.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(bundle: Path, model: Path, threads: int, tokens: int, rounds: int, without_genai: bool, as_json: bool) -> None:
    """Measures milliseconds a token of plain greedy decoding in fp32, engine by engine."""
    with (
        tempfile.TemporaryDirectory(prefix="dflash-speed-") as scratch,
        Session.open(bundle, threads=threads) as session,
    ):
        with needs_extra("export"):
            reference = ReferenceModel(model, threads)
        engines: dict[str, Decode] = {OURS: _plain(session), "transformers eager": reference.timed_decode}
        if not without_genai:
            converted = Path(scratch) / "genai"
            convert(model, converted, Path(scratch) / "cache")
            engines["onnxruntime-genai fp32"] = GenaiModel(converted, threads).timed_decode
        ids = reference.encode(PROMPT)
        with ProgressLine() as progress:
            times, said = take_turns(engines, ids, tokens, rounds, progress)
    medians = {name: statistics.median(values) for name, values in times.items()}
    facts = {
        name: {
            "ms_per_token": round(ms, 2),
            "ratio_to_ours": round(ms / medians[OURS], 3),
            "all_rounds_ms": [round(value, 2) for value in times[name]],
            "same_tokens": said[name] == said[OURS][: len(said[name])],
        }
        for name, ms in medians.items()
    }
    if as_json:
        click.echo(json.dumps({"threads": threads, "prompt_tokens": len(ids), "tokens": tokens, "engines": facts}))
        return
    click.echo(f"{threads} threads, prompt of {len(ids)} tokens, {tokens} new tokens, median of {rounds} rounds")
    for name, row in facts.items():
        words = "" if row["same_tokens"] else "  (other tokens)"
        click.echo(f"{name:<24} {row['ms_per_token']:>7} ms/token  {row['ratio_to_ours']:.2f} x ours{words}")


def take_turns(
    engines: dict[str, Decode], ids: Sequence[int], tokens: int, rounds: int, progress: ProgressLine
) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
    """Runs every engine once to warm up, then `rounds` times in turn.

    Returns:
        Milliseconds a token of every round, and the tokens, by engine.
    """
    times: dict[str, list[float]] = {name: [] for name in engines}
    said: dict[str, list[int]] = {}
    for i in range(rounds + 1):
        progress("decode", i, rounds + 1)
        for name, decode in engines.items():
            time.sleep(REST_S)
            said[name], milliseconds = decode(ids, tokens)
            if i > 0:
                times[name].append(milliseconds)
    return times, said


def _plain(session: Session) -> Decode:
    def decode(ids: Sequence[int], tokens: int) -> tuple[list[int], float]:
        result = session.generate(ids, GenerationConfig(max_new_tokens=tokens, plain=True, stop_token_ids=()))
        return result.token_ids, 1000 / result.tokens_per_s

    return decode


if __name__ == "__main__":
    main()

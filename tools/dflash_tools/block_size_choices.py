"""What choosing block sizes round by round is worth: `python -m dflash_tools.block_size_choices BUNDLE`.

Every text is decoded with the sizes chosen, with each fixed size and plain, in turn, in one run. Then what the drafter
gets right is recorded at every place, for every size, and the same is played again with the measured times of a round:
there no noise of the machine is left, and a text that changes its kind can be made of parts.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from dflash_runtime import GenerationConfig, GenerationResult, Session
from dflash_runtime.adaptive import BlockSizeController
from dflash_runtime.backend import open_backend
from dflash_runtime.errors import PromptError
from dflash_tools.choices_chart import ChosenRound, choices_chart
from dflash_tools.error_lines import DFlashCommand
from dflash_tools.progress import ProgressLine
from dflash_tools.prompt_file import Messages, read_prompts
from dflash_tools.recorded_acceptance import RecordedText, compare_choices, join_texts, record_text

AUTO = 0
"""In place of a block size: chosen round by round."""
TEXTS: dict[str, str | Messages] = {
    "counting": "Count from 1 to 100, separated by commas.",
    "story": "Tell me a story about a lighthouse keeper and a storm.",
    "sums": "What is 12 times 7, plus 45, minus 8? Show each step.",
    "code": "Write a Python function that returns the n-th Fibonacci number, and explain it.",
}
"""Of kinds that a drafter finds easy and hard."""
PART_TOKENS = 120
Results = dict[tuple[str, int], list[GenerationResult]]
"""By text and block size."""


class WatchedController(BlockSizeController):
    """Keeps what it was told."""

    def __init__(self, block_sizes: Sequence[int]) -> None:
        super().__init__(block_sizes)
        self.rounds: list[ChosenRound] = []

    def observe(self, block_size: int, committed: int, elapsed_ms: float, *, complete: bool = True) -> None:
        """See `BlockSizeController.observe`."""
        self.rounds.append(ChosenRound(block_size, committed, elapsed_ms))
        super().observe(block_size, committed, elapsed_ms, complete=complete)


@click.command(cls=DFlashCommand)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--prompts", type=click.Path(path_type=Path), help="A prompt a line, .txt or .jsonl. [default: four own]")
@click.option("--limit", type=click.IntRange(1), default=8, show_default=True, help="Prompts taken from the file.")
@click.option("--max-new-tokens", type=click.IntRange(8), default=256, show_default=True, metavar="N")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Times each is decoded.")
@click.option("--backend", default="ort-cpu", show_default=True)
@click.option("--threads", type=click.IntRange(1), help="[default: the backend chooses]")
@click.option("--svg", type=click.Path(path_type=Path, dir_okay=False), help="Write a picture of the last choices.")
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), help="Write what the drafter gets right.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    bundle: Path, prompts: Path | None, limit: int, max_new_tokens: int, rounds: int, backend: str,
    threads: int | None, svg: Path | None, record: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Measures and replays the choice of block sizes, greedy, stop tokens ignored."""
    texts = TEXTS
    if prompts is not None:
        texts = {f"prompt {i}": prompt for i, prompt in enumerate(read_prompts(prompts)[:limit], 1)}
    with ProgressLine() as progress:
        with Session.open(bundle, backend=backend, threads=threads) as session:
            sizes = [size for size in session.bundle.manifest.block_sizes if size > 1]
            if session.bundle.manifest.drafter is None or not sizes:
                raise PromptError(f"{bundle} has no drafter, so there is no block size to choose.")
            watched = session.controller = WatchedController(sizes)
            config = GenerationConfig(max_new_tokens=max_new_tokens, stop_token_ids=(), reuse_prefix=False)
            ids = {name: prompt_ids(session, prompt) for name, prompt in texts.items()}
            results, chart = decode_in_turn(session, watched, ids, [AUTO, 1, *sizes], rounds, config, progress)
            opened = session.bundle
        round_ms = {size: statistics.median(round_time_ms(r) for name in ids for r in results[name, size])
                    for size in (1, *sizes)}  # fmt: skip
        again = open_backend(backend, opened, threads, 128)
        recorded = [record_text(again, name, prompt, results[name, 1][0].token_ids, sizes, progress)
                    for name, prompt in ids.items()]  # fmt: skip
        again.close()
    told = {
        "backend": backend, "threads": threads, "max_new_tokens": max_new_tokens, "rounds": rounds,
        "round_ms": round_ms, "measured_ms_per_token": {name: measured_ms(results, name) for name in ids},
        "played_ms_per_token": {text.name: played_ms(text, rounds, round_ms) for text in with_mixed(recorded)},
        "same_tokens": all(result.token_ids == results[name, 1][0].token_ids
                           for (name, _), found in results.items() for result in found),
    }  # fmt: skip
    if svg is not None:
        svg.write_text(choices_chart(chart), encoding="utf-8")
    if record is not None:
        data = {"round_ms": round_ms, "texts": [text.to_json() for text in recorded]}
        record.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    click.echo(json.dumps(told) if as_json else "\n".join(report_lines(told)))


def decode_in_turn(
    session: Session, watched: WatchedController, texts: Mapping[str, list[int]], sizes: Sequence[int], rounds: int,
    config: GenerationConfig, progress: ProgressLine,
) -> tuple[Results, list[tuple[str, list[ChosenRound]]]]:  # fmt: skip
    """Results by text and block size, and the rounds of the last time that sizes were chosen."""
    results: Results = {(name, size): [] for name in texts for size in sizes}
    chart, done = list[tuple[str, list[ChosenRound]]](), 0
    for number in range(rounds):
        chart = []
        for name, prompt in texts.items():
            for size in [*sizes[number % len(sizes) :], *sizes[: number % len(sizes)]]:  # none is always the first
                progress("decoding in turn", done, rounds * len(results))
                chosen = dataclasses.replace(config, block_size="auto" if size == AUTO else size)
                if size == 1:
                    chosen = dataclasses.replace(config, plain=True)
                watched.rounds = []
                results[name, size].append(session.generate(prompt, chosen))
                if size == AUTO:
                    chart.append((name, watched.rounds))
                done += 1
    return results, chart


def token_ms(result: GenerationResult) -> float:
    """Milliseconds a token, the first left out."""
    return 1000 / result.tokens_per_s


def round_time_ms(result: GenerationResult) -> float:
    """Milliseconds a round; those that were shortened at the end count as whole ones."""
    return token_ms(result) * (len(result.token_ids) - 1) / sum(result.rounds_by_block_size.values())


def prompt_ids(session: Session, prompt: str | Messages) -> list[int]:
    """Tokens of a prompt: through the chat template where there is one."""
    if session.tokenizer is None:
        raise PromptError(f"{session.bundle.path} has no tokenizer, so texts cannot be its prompts.")
    if isinstance(prompt, str) and not session.tokenizer.has_chat_template:
        return session.tokenizer.encode_text(prompt)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return session.tokenizer.encode_messages(messages, None)


def with_mixed(recorded: Sequence[RecordedText]) -> list[RecordedText]:
    """The texts, and one of parts of all of them."""
    parts = min(PART_TOKENS, *(text.num_tokens for text in recorded))
    return [*recorded, join_texts(recorded, "mixed", parts)] if len(recorded) > 1 else list(recorded)


def measured_ms(results: Results, name: str) -> dict[str, float]:
    """Median milliseconds a token of a text, by how its block sizes came."""
    own = {size: found for (of, size), found in results.items() if of == name}
    return {_words(size): statistics.median(map(token_ms, found)) for size, found in own.items()}


def played_ms(text: RecordedText, rounds: int, round_ms: Mapping[int, float]) -> dict[str, float]:
    """The same of a record, decoded as often in one go; the controller knows the times beforehand."""
    own, fixed = compare_choices([text] * rounds, round_ms)
    whole = rounds * text.num_tokens
    return {_words(AUTO): own / whole, **{_words(size): ms / whole for size, ms in fixed.items()}}


def report_lines(told: Mapping[str, Any]) -> list[str]:
    """What is printed for people."""
    times = ", ".join(f"{_words(size)} {ms:.1f} ms" for size, ms in told["round_ms"].items())
    out = [f"{told['backend']}, {told['rounds']} times {told['max_new_tokens']} tokens; a round takes: {times}",
           f"all texts have the same tokens however decoded: {'yes' if told['same_tokens'] else 'no'}"]  # fmt: skip
    for title, key in (("measured", "measured_ms_per_token"), ("played with these times", "played_ms_per_token")):
        out.append(f"{title}, ms a token:")
        for name, ms in told[key].items():
            fixed = {how: value for how, value in ms.items() if how != _words(AUTO)}
            best = min(fixed, key=lambda how: fixed[how])
            rest = ", ".join(f"{how} {value:.1f}" for how, value in fixed.items())
            ratio = ms[_words(AUTO)] / fixed[best]
            out.append(f"  {name}: chosen {ms[_words(AUTO)]:.1f} ({ratio:.3f} of {best}); {rest}")
    return out


def _words(size: int) -> str:
    return {AUTO: "chosen", 1: "plain"}.get(size, f"block {size}")


if __name__ == "__main__":
    main()

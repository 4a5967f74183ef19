"""What keeping rows from turn to turn saves: `python -m dflash_tools.chat_turns BUNDLE`.

A conversation runs some times as `chat` runs it, and then every turn once more with its whole history read anew, which
is what a fresh session does, behind the same text. The kept rows come from other calls than those of a new prefill, so
that sums may be rounded otherwise: where two tokens are almost equally likely, the other one may follow.

Beside the clock's time to the first token there is the processor's, which another program on the machine does not
lengthen (with `--threads 1`; more threads wait for each other by spinning), and the rows that were run.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import click

from dflash_runtime import GenerationConfig, GenerationResult, Session
from dflash_runtime.errors import DFlashError
from dflash_tools.conversation import Message
from dflash_tools.error_lines import DFlashCommand
from dflash_tools.progress import ProgressLine

QUESTIONS = (
    "Name a river in Europe, please.", "And one in Africa, if you can?", "Which of the two is longer?",
    "Tell me a town beside the first.", "What do people eat in that town?", "How would I get there by train?",
    "What is the weather like in May?", "Is there a museum worth a visit?", "What should I bring home from it?",
    "Thank you. Sum it up in a line.",
)  # fmt: skip
"""Of about one length, so that the turns are alike but for what lies behind them."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """One turn of all conversations."""

    turn: int
    prompt_tokens: int
    reused_tokens: int
    rows_run: int
    """Prompt tokens that were not kept."""
    answer_tokens: int
    kept_ms: float
    """Time to the first token where rows are kept; median."""
    kept_cpu_ms: float
    """The same in the processor's time of all threads."""
    whole_ms: float
    """The same with the whole history read anew, once."""
    same_tokens: bool
    """All answers are one, token for token."""


@dataclasses.dataclass(frozen=True)
class Said:
    """One turn of one conversation."""

    result: GenerationResult
    cpu_ms: float
    """The processor's time to the first token."""


@click.command(cls=DFlashCommand)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--turns", type=click.IntRange(2), default=10, show_default=True)
@click.option("--max-new-tokens", type=click.IntRange(1), default=24, show_default=True, metavar="N")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Conversations with rows kept.")
@click.option("--block-size", type=int, metavar="N", help="[default: the drafter's own]")
@click.option("--plain", is_flag=True, help="Decode without the drafter.")
@click.option("--backend", default="ort-cpu", show_default=True)
@click.option("--threads", type=click.IntRange(1), help="[default: the backend chooses]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    bundle: Path, turns: int, max_new_tokens: int, rounds: int, block_size: int | None, plain: bool, backend: str,
    threads: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Measures the time to the first token, turn by turn, with rows kept and without."""
    config = GenerationConfig(max_new_tokens=max_new_tokens, block_size=block_size, plain=plain)
    with Session.open(bundle, backend=backend, threads=threads) as session, ProgressLine() as progress:
        if session.tokenizer is None or not session.tokenizer.has_chat_template:
            raise DFlashError(f"{bundle} has no chat template, so there are no turns to measure.")
        kept = []
        for number in range(rounds):
            progress("rows kept", number, rounds)
            kept.append(converse(session, config, turns))
        progress("read anew", 0, 1)
        whole = read_anew(session, config, [said.result.text for said in kept[0]])
    told = [summary(number, [one[number] for one in kept], whole[number]) for number in range(turns)]
    second, last = told[1], told[-1]
    ratio, cpu_ratio = last.kept_ms / second.kept_ms, last.kept_cpu_ms / second.kept_cpu_ms
    same = sum(turn.same_tokens for turn in told)
    if as_json:
        rows = [dataclasses.asdict(turn) for turn in told]
        ratios = {"last_to_second": ratio, "last_to_second_cpu": cpu_ratio}
        click.echo(json.dumps({"turns": rows, **ratios, "same_turns": same, "backend": backend}))
        return
    click.echo("turn  prompt tokens  kept  run  first token, kept  processor  first token, read anew  same tokens")
    for turn in told:
        click.echo(f"{turn.turn:4}  {turn.prompt_tokens:13}  {turn.reused_tokens:4}  {turn.rows_run:3}  "
                   f"{turn.kept_ms:14.1f} ms  {turn.kept_cpu_ms:6.1f} ms  {turn.whole_ms:19.1f} ms  "
                   f"{'yes' if turn.same_tokens else 'no':>11}")  # fmt: skip
    click.echo(f"first token of turn {turns} against turn 2, rows kept: {ratio:.2f} times by the clock, "
               f"{cpu_ratio:.2f} times in the processor's time; {last.rows_run} rows run and {second.rows_run}; "
               f"median of {rounds}")  # fmt: skip


def converse(session: Session, config: GenerationConfig, turns: int) -> list[Said]:
    """One conversation that keeps its rows; it begins without any."""
    answers, found = list[str](), list[Said]()
    for number in range(turns):
        began_s = time.process_time()
        pieces = session.stream(history(answers), dataclasses.replace(config, reuse_prefix=number > 0))
        next(pieces)
        cpu_ms = 1000 * (time.process_time() - began_s)
        for _ in pieces:
            pass
        found.append(Said(pieces.result, cpu_ms))
        answers.append(pieces.result.text)
    return found


def read_anew(session: Session, config: GenerationConfig, answers: Sequence[str]) -> list[GenerationResult]:
    """Every turn of a conversation with its whole history as one prompt."""
    anew = dataclasses.replace(config, reuse_prefix=False)
    return [session.generate(history(answers[:number]), anew) for number in range(len(answers))]


def history(answers: Sequence[str]) -> list[Message]:
    """The messages up to the question behind so many answers."""
    messages = list[Message]()
    for number in range(len(answers) + 1):
        messages.append({"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]})
        if number < len(answers):
            messages.append({"role": "assistant", "content": answers[number]})
    return messages


def summary(number: int, kept: Sequence[Said], whole: GenerationResult) -> Turn:
    """One turn of all conversations; they are alike, as decoding is greedy."""
    return Turn(
        turn=number + 1,
        prompt_tokens=whole.prompt_token_count,
        reused_tokens=kept[0].result.reused_token_count,
        rows_run=whole.prompt_token_count - kept[0].result.reused_token_count,
        answer_tokens=len(kept[0].result.token_ids),
        kept_ms=statistics.median(said.result.time_to_first_token_ms for said in kept),
        kept_cpu_ms=statistics.median(said.cpu_ms for said in kept),
        whole_ms=whole.time_to_first_token_ms,
        same_tokens=all(said.result.token_ids == whole.token_ids for said in kept),
    )


if __name__ == "__main__":
    main()

"""What keeping rows from turn to turn saves: `python -m dflash_tools.chat_turns BUNDLE`.

A conversation runs some times as `chat` runs it, and then every turn once more with its whole history read anew, which
is what a fresh session does, behind the same text. The kept rows come from other calls than those of a new prefill, so
that sums may be rounded otherwise: where two tokens are almost equally likely, the other one may follow.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
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
    answer_tokens: int
    kept_ms: float
    """Time to the first token where rows are kept; median."""
    whole_ms: float
    """The same with the whole history read anew, once."""
    same_tokens: bool
    """All answers are one, token for token."""


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
        whole = read_anew(session, config, [result.text for result in kept[0]])
    told = [summary(number, [one[number] for one in kept], whole[number]) for number in range(turns)]
    ratio = told[-1].kept_ms / told[1].kept_ms
    same = sum(turn.same_tokens for turn in told)
    if as_json:
        rows = [dataclasses.asdict(turn) for turn in told]
        click.echo(json.dumps({"turns": rows, "last_to_second": ratio, "same_turns": same, "backend": backend}))
        return
    click.echo("turn  prompt tokens  kept  first token, kept  first token, read anew  same tokens")
    for turn in told:
        click.echo(f"{turn.turn:4}  {turn.prompt_tokens:13}  {turn.reused_tokens:4}  {turn.kept_ms:14.1f} ms  "
                   f"{turn.whole_ms:19.1f} ms  {'yes' if turn.same_tokens else 'no':>11}")
    click.echo(f"first token of turn {turns} against turn 2, rows kept: {ratio:.2f} times; median of {rounds}")


def converse(session: Session, config: GenerationConfig, turns: int) -> list[GenerationResult]:
    """One conversation that keeps its rows; it begins without any."""
    answers, results = list[str](), list[GenerationResult]()
    for number in range(turns):
        chosen = dataclasses.replace(config, reuse_prefix=number > 0)
        results.append(session.generate(history(answers), chosen))
        answers.append(results[-1].text)
    return results


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


def summary(number: int, kept: Sequence[GenerationResult], whole: GenerationResult) -> Turn:
    """One turn of all conversations; they are alike, as decoding is greedy."""
    return Turn(
        turn=number + 1,
        prompt_tokens=whole.prompt_token_count,
        reused_tokens=kept[0].reused_token_count,
        answer_tokens=len(kept[0].token_ids),
        kept_ms=statistics.median(result.time_to_first_token_ms for result in kept),
        whole_ms=whole.time_to_first_token_ms,
        same_tokens=all(result.token_ids == whole.token_ids for result in kept),
    )


if __name__ == "__main__":
    main()

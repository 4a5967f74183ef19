"""What keeping rows from turn to turn saves: `python -m dflash_tools.chat_turns BUNDLE`.

A conversation runs twice in a session: once as `chat` runs it, once with every turn's whole history read anew, which is
what a fresh session does. The tokens of a turn are compared while both have said the same so far. The kept rows come
from other calls than those of a new prefill, so that sums may be rounded otherwise: where two tokens are almost equally
likely, the other one may follow.
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
    """One turn, over all rounds; times are medians."""

    turn: int
    prompt_tokens: int
    reused_tokens: int
    answer_tokens: int
    kept_ms: float
    """Time to the first token where rows are kept."""
    whole_ms: float
    """The same with the whole history read anew."""
    same_tokens: bool
    """The answers of both are one, token for token, in every round."""


@click.command(cls=DFlashCommand)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--turns", type=click.IntRange(2), default=10, show_default=True)
@click.option("--max-new-tokens", type=click.IntRange(1), default=24, show_default=True, metavar="N")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Conversations of each kind.")
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
        measured = []
        for number in range(rounds):
            progress("conversations", number, rounds)
            measured.append(converse(session, config, turns))
    told = [summary(number, [one[number] for one in measured]) for number in range(turns)]
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


def converse(session: Session, config: GenerationConfig, turns: int) -> list[tuple[GenerationResult, GenerationResult]]:
    """One conversation: the result of every turn with rows kept, and with everything read anew behind the same text."""
    anew = dataclasses.replace(config, reuse_prefix=False)
    messages: list[Message] = []
    kept, histories = list[GenerationResult](), list[list[Message]]()
    for number in range(turns):
        messages.append({"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]})
        histories.append(list(messages))
        kept.append(session.generate(messages, config if number else anew))  # nothing of a conversation before
        messages.append({"role": "assistant", "content": kept[-1].text})
    return list(zip(kept, (session.generate(history, anew) for history in histories), strict=True))


def summary(number: int, results: Sequence[tuple[GenerationResult, GenerationResult]]) -> Turn:
    """One turn of all conversations; they are alike, as decoding is greedy."""
    first, _ = results[0]
    return Turn(
        turn=number + 1,
        prompt_tokens=first.prompt_token_count,
        reused_tokens=first.reused_token_count,
        answer_tokens=len(first.token_ids),
        kept_ms=statistics.median(kept.time_to_first_token_ms for kept, _ in results),
        whole_ms=statistics.median(whole.time_to_first_token_ms for _, whole in results),
        same_tokens=all(kept.token_ids == whole.token_ids for kept, whole in results),
    )


if __name__ == "__main__":
    main()

"""What `--draft-window` costs and spares on `ort-cpu`: `python -m dflash_tools.draft_window_effect BUNDLE --window N`.

Every engine answers the same prompts, each behind so much other text that the windows are full. The bundle is left as
it is: engines are made in a copy of its folder, beside it, whose files are hard links.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from dflash_runtime import GenerationConfig, GenerationResult, Session
from dflash_runtime.bundle import Bundle
from dflash_runtime.engine_record import open_engine
from dflash_runtime.errors import DFlashError, OutputError, PromptError
from dflash_runtime.tokenizer import Tokenizer
from dflash_tools.acceptance import mean_acceptance
from dflash_tools.bench_prompts import REFERENCE, find_prompts
from dflash_tools.error_lines import DFlashCommand, needs_extra
from dflash_tools.plan_formulas import capacity_tokens
from dflash_tools.progress import ProgressLine
from dflash_tools.sizes import bytes_text


@dataclasses.dataclass(frozen=True)
class Effect:
    """One engine."""

    window_tokens: int | None
    """None: layers see what the drafter was made to see."""
    drafter_kv_bytes: int
    acceptance_length: float
    """Committed tokens by rounds, the target's own included."""
    rounds: int
    same_texts: int
    """Answers that are, token for token, those of the engine without a window."""


@click.command(cls=DFlashCommand)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--window", "windows", type=click.IntRange(1), multiple=True, required=True, help="Repeatable.")
@click.option("--prompts", default=REFERENCE, show_default=True, help="A set or a file, as `bench` takes them.")
@click.option("--num-prompts", type=click.IntRange(1), default=6, show_default=True)
@click.option("--context", type=click.IntRange(1), default=1000, show_default=True, help="Least tokens of a prompt.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--block-size", type=int, metavar="N", help="[default: the drafter's own]")
@click.option("--threads", type=click.IntRange(1), help="[default: ONNX Runtime chooses]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    bundle: Path, windows: tuple[int, ...], prompts: str, num_prompts: int, context: int, max_new_tokens: int,
    block_size: int | None, threads: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Compares acceptance and the drafter's cache with and without windows for layers that see the whole context."""
    opened = Bundle.open(bundle)
    questions = behind_context(opened, find_prompts(prompts, num_prompts).conversations, context)
    config = GenerationConfig(max_new_tokens=max_new_tokens, block_size=block_size, reuse_prefix=False)
    effects, expected = list[Effect](), list[GenerationResult]()
    with needs_extra("engines"), ProgressLine() as progress, linked_copy(opened) as copy:
        from dflash_engines.ort_cpu import lower_bundle

        for number, window in enumerate((None, *windows)):
            progress("windows", number, 1 + len(windows))
            lower_bundle(Bundle.open(copy, check_files=False), draft_window_tokens=window)
            with Session.open(copy, threads=threads) as session:
                found = [session.generate(ids, config) for ids in questions]
            expected = expected or found
            effects.append(summary(Bundle.open(copy, check_files=False), window, found, expected))
    lengths = [len(ids) for ids in questions]
    if as_json:
        engines = [dataclasses.asdict(effect) for effect in effects]
        click.echo(json.dumps({"prompt_tokens": lengths, "engines": engines}))
        return
    click.echo(f"{len(questions)} prompts of {min(lengths)} to {max(lengths)} tokens")
    click.echo("window  drafter cache  tokens a round  rounds  same texts")
    for effect in effects:
        click.echo(f"{effect.window_tokens or 'none':>6}  {bytes_text(effect.drafter_kv_bytes):>13}  "
                   f"{effect.acceptance_length:14.3f}  {effect.rounds:6}  {effect.same_texts} of {len(questions)}")


def behind_context(bundle: Bundle, conversations: Sequence[object], context_tokens: int) -> list[list[int]]:
    """Ids of each first turn, behind the texts of the others and its own until there are so many.

    Raises:
        PromptError: the bundle has no tokenizer, or a conversation is not of a user's turns.
    """
    tokenizer = Tokenizer.open(bundle)
    if tokenizer is None:
        raise PromptError(f"{bundle.path} has no tokenizer, so texts cannot be put to it.")
    texts = [turns[0] for turns in conversations if isinstance(turns, list) and isinstance(turns[0], str)]
    if len(texts) != len(conversations) or not texts:
        raise PromptError("These prompts are messages; texts are needed, to put some behind others.")
    return [_behind(tokenizer, texts, number, context_tokens) for number in range(len(texts))]


def _behind(tokenizer: Tokenizer, texts: Sequence[str], number: int, context_tokens: int) -> list[int]:
    said, earlier = [texts[number]], number
    while True:
        text = "\n\n".join(said)
        messages = [{"role": "user", "content": text}]
        ids = tokenizer.encode_messages(messages) if tokenizer.has_chat_template else tokenizer.encode_text(text)
        if len(ids) >= context_tokens:
            return ids
        earlier -= 1
        said.insert(0, texts[earlier % len(texts)])


@contextmanager
def linked_copy(bundle: Bundle) -> Iterator[Path]:
    """The bundle's own files in a folder beside it, without engines.

    Raises:
        OutputError: no folder can be made there, or no hard links.
    """
    try:
        folder = tempfile.mkdtemp(prefix=f".{bundle.path.name}.windows.", dir=bundle.path.resolve().parent)
    except OSError as error:
        raise OutputError(f"No folder can be made beside {bundle.path}: {error}. Copy the bundle elsewhere.") from error
    try:
        for name in ("bundle.json", *bundle.manifest.files):
            place = Path(folder) / "copy" / name
            place.parent.mkdir(parents=True, exist_ok=True)
            os.link(bundle.file(name), place)
        yield Path(folder) / "copy"
    except OSError as error:
        raise OutputError(f"{bundle.path} cannot be linked: {error}. Copy it to a file system with links.") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def summary(
    bundle: Bundle, window: int | None, found: Sequence[GenerationResult], expected: Sequence[GenerationResult]
) -> Effect:
    """What an engine did.

    Raises:
        DFlashError: nothing was drafted.
    """
    manifest, rings = bundle.manifest, open_engine(bundle, "ort-cpu").rings
    mean = mean_acceptance([result.acceptance_lengths for result in found])
    if mean is None or manifest.drafter is None:
        raise DFlashError("Nothing was drafted. Take a bundle with a drafter and more --max-new-tokens.")
    capacity = capacity_tokens(manifest.max_context_tokens, manifest.block_sizes)
    rows = {t.input: rings[t.input].rows if t.input in rings else capacity for t in manifest.drafter.graph.state}
    shapes = [tensor.cache_shape(rows[tensor.input]) for tensor in manifest.drafter.graph.state]
    return Effect(
        window, sum(4 * heads * count * size for _, heads, count, size in shapes), mean.over_rounds,
        sum(result.num_drafts for result in found),
        sum(one.token_ids == two.token_ids for one, two in zip(found, expected, strict=True)),
    )  # fmt: skip


if __name__ == "__main__":
    main()

"""`dflash-export run`: a bundle and a prompt to text."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Literal

import click

from dflash_runtime.engine_record import open_engine
from dflash_runtime.generation import GenerationConfig, GenerationResult
from dflash_runtime.session import Prompt, Session
from dflash_tools.error_lines import DFlashCommand
from dflash_tools.option_values import BLOCK_SIZE, read_template_args, read_token_ids
from dflash_tools.prompt_progress import PromptProgress
from dflash_tools.ring_lines import DRAFT_WINDOW, ring_lines
from dflash_tools.run_block_size import chosen_words, set_block_size
from dflash_tools.sampling_options import sampling_options
from dflash_tools.sizes import counted


@click.command("run", cls=DFlashCommand, short_help="Answer a prompt.")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("prompt", required=False)
@click.option("--max-new-tokens", type=int, default=128, show_default=True, metavar="N", help="Longest answer.")
@click.option(
    "--block-size",
    type=BLOCK_SIZE,
    metavar="N|auto",
    help="Tokens in a block, anchor included; auto: what pays, round by round, plain decoding included.  [default: "
    "auto where several sizes are built, else the built one, or plain decoding if `tune` found that faster]",
)
@click.option("--plain", is_flag=True, help="Decode without the drafter, one token a step, on the same engine.")
@click.option("--raw", is_flag=True, help="Give the prompt to the model as it is, without the chat template.")
@click.option(
    "--template-arg",
    "template_args",
    multiple=True,
    metavar="KEY=VALUE",
    help="Argument for the chat template, over the bundle's own; repeatable.",
)
@sampling_options
@click.option("--ids", is_flag=True, help="PROMPT is token ids, and so is the output.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of text.")
@click.option("--backend", default="ort-cpu", show_default=True, help="What executes the graphs.")
@click.option("--threads", type=click.IntRange(1), metavar="N", help="CPU threads. [default: the backend chooses]")
@click.option("--cuda-graphs/--no-cuda-graphs", default=None,
              help="On a GPU: enqueue each cycle as one CUDA graph. [default: where the backend is known to allow it]")
def command(
    bundle: Path,
    prompt: str | None,
    max_new_tokens: int,
    block_size: int | Literal["auto"] | None,
    plain: bool,
    raw: bool,
    template_args: tuple[str, ...],
    ids: bool,
    as_json: bool,
    backend: str,
    threads: int | None,
    cuda_graphs: bool | None,
    **sampling: Any,
) -> None:
    """Answers PROMPT with BUNDLE.

    A PROMPT of -, or none while something is piped in, is read from standard input, without the line end behind it
    unless --raw is given.

    The text streams to standard output. How far a long prompt is read, speed and acceptance go to standard error, on a
    terminal only.
    """
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError("Give a PROMPT, or - to read it from standard input.")
    text = str(prompt) if prompt not in (None, "-") else _standard_input(raw=raw)
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        block_size=block_size,
        plain=plain,
        raw=raw,
        template_args=read_template_args(template_args) or None,
        progress=PromptProgress(),
        **sampling,
    )
    question: Prompt = read_token_ids(text) if ids else text
    with Session.open(bundle, backend=backend, threads=threads, cuda_graphs=cuda_graphs) as session:
        tell_settings(session, backend, config, uses_template=not (ids or raw))
        picked = set_block_size(session, config, backend, threads, _prompt_tokens(session, question))
        adaptive, reason = picked.config.block_size == "auto", picked.reason
        _tell(reason or "")
        result = _answer(session, question, picked.config, as_text=not (ids or as_json))
        if adaptive:
            reason = " ".join(words for words in (reason, chosen_words(session.controller, result)) if words)
    if as_json:
        chosen: dict[str, Any] = {"rounds_by_block_size": result.rounds_by_block_size} if adaptive else {}
        chosen |= {"block_size_reason": reason} if reason else {}
        click.echo(json.dumps({**result.to_json(), **chosen}, ensure_ascii=False))
    elif ids:
        click.echo(" ".join(str(token) for token in result.token_ids))
    _tell(statistics_line(result, adaptive=adaptive))
    _tell(chosen_words(session.controller, result) if adaptive else "")


def _standard_input(*, raw: bool) -> str:
    text = sys.stdin.read()
    if not text:
        raise click.UsageError("Standard input is empty. Give a PROMPT, or pipe one in.")
    return text if raw else text.removesuffix("\n")  # `echo` puts it there


def _answer(session: Session, prompt: Prompt, config: GenerationConfig, *, as_text: bool) -> GenerationResult:
    pieces = session.stream(prompt, config)
    for piece in pieces:
        if as_text:
            sys.stdout.write(piece)
            sys.stdout.flush()
    if as_text:
        sys.stdout.write("\n")
    return pieces.result


def _prompt_tokens(session: Session, prompt: Prompt) -> int:
    """Length of the prompt, about: without what the chat template puts around it."""
    if not isinstance(prompt, str):
        return len(prompt)
    return 0 if session.tokenizer is None else len(session.tokenizer.encode_text(prompt))


def tell_settings(session: Session, backend: str, config: GenerationConfig, *, uses_template: bool) -> None:
    """Says on a terminal what happens without having been asked for."""
    if not sys.stderr.isatty():
        return
    manifest = session.bundle.manifest
    record = open_engine(session.bundle, backend) if backend == "ort-cpu" else None
    if record is not None and DRAFT_WINDOW in record.versions:
        _tell(list(ring_lines(record))[-1])
    if record is not None and record.upcast:
        _tell(f"The bundle's {manifest.precision} weights run as fp32: ONNX Runtime's CPU has no half MatMul.")
    arguments = {**manifest.text.template_args, **(config.template_args or {})}
    if uses_template and manifest.text.has_chat_template and arguments:
        shown = ", ".join(f"{name}={json.dumps(value)}" for name, value in arguments.items())
        _tell(f"Chat template arguments: {shown} (change them with --template-arg).")


def statistics_line(result: GenerationResult, *, adaptive: bool) -> str:
    """What a request cost, in one line; `adaptive` where block sizes were chosen round by round."""
    parts = [f"{counted(len(result.token_ids), 'token')} ({result.finish_reason})"]
    if result.tokens_per_s:
        parts.append(f"{result.tokens_per_s:.1f} tokens/s")
    parts.append(f"first token after {result.time_to_first_token_ms:.0f} ms")
    if result.num_drafts:
        parts.append(f"{result.mean_acceptance_length:.2f} tokens a round in {counted(result.num_drafts, 'round')}")
    elif not adaptive:
        parts.append("plain decoding")
    if result.block_size > 1:
        parts.append(f"block sizes up to {result.block_size}" if adaptive else f"block size {result.block_size}")
    return f"[{', '.join(parts)}, {result.backend}]"


def _tell(line: str) -> None:
    if line and sys.stderr.isatty():
        click.echo(line, err=True)

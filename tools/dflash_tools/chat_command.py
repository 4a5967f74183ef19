"""`dflash-export chat`: a conversation with a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click

from dflash_runtime.generation import GenerationConfig
from dflash_runtime.session import Session
from dflash_tools.bench_prompts import template_text, thinking_args
from dflash_tools.chat_blocks import LEGEND
from dflash_tools.chat_loop import Chat
from dflash_tools.chat_screen import ChatScreen
from dflash_tools.chat_slash import EXIT, run_slash_command
from dflash_tools.error_lines import EXIT_REFUSED, DFlashCommand
from dflash_tools.option_values import BLOCK_SIZE, read_template_args
from dflash_tools.run_block_size import set_block_size
from dflash_tools.run_command import tell_settings
from dflash_tools.sampling_options import sampling_options


@click.command("chat", cls=DFlashCommand, short_help="Have a conversation.")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--max-new-tokens", type=int, default=1024, show_default=True, metavar="N", help="Longest answer.")
@click.option(
    "--block-size", type=BLOCK_SIZE, metavar="N|auto",
    help="Tokens in a block, anchor included; auto: what pays, round by round, plain decoding included.  [default: "
    "auto where several sizes are built, else the built one, or plain decoding if `tune` found that faster]",
)  # fmt: skip
@click.option("--plain", is_flag=True, help="Decode without the drafter, one token a step, on the same engine.")
@click.option("--system", metavar="TEXT", help="System prompt.")
@click.option("--thinking/--no-thinking", default=None,
              help="Think before answering, where the chat template knows how. [default: as the pair was trained]")
@click.option("--template-arg", "template_args", multiple=True, metavar="KEY=VALUE",
              help="Argument for the chat template, over the bundle's own; repeatable.")
@click.option("--show-blocks", is_flag=True, help="On a terminal: show in colour what the drafter said.")
@sampling_options
@click.option("--backend", default="ort-cpu", show_default=True, help="What executes the graphs.")
@click.option("--threads", type=click.IntRange(1), metavar="N", help="CPU threads. [default: the backend chooses]")
@click.option("--cuda-graphs/--no-cuda-graphs", default=None,
              help="On a GPU: enqueue each cycle as one CUDA graph. [default: where the backend is known to allow it]")
def command(
    bundle: Path,
    max_new_tokens: int,
    block_size: int | Literal["auto"] | None,
    plain: bool,
    system: str | None,
    thinking: bool | None,
    template_args: tuple[str, ...],
    show_blocks: bool,
    backend: str,
    threads: int | None,
    cuda_graphs: bool | None,
    **sampling: Any,
) -> None:
    """Talks with BUNDLE, one line a message; /help lists what else a line can be.

    What both models have read stays in their caches, so that a turn costs what is new in it. Ctrl-C stops an answer and
    keeps the rest. Lines can be piped in: the answers go to standard output and nothing else does; the exit code is 1
    where one of them could not be answered.
    """
    screen = ChatScreen()
    with Session.open(bundle, backend=backend, threads=threads, cuda_graphs=cuda_graphs) as session:
        switch = None if thinking is None else "on" if thinking else "off"
        args = {**read_template_args(template_args), **thinking_args(template_text(session.bundle), switch)}
        config = GenerationConfig(
            max_new_tokens=max_new_tokens, block_size=block_size, plain=plain, template_args=args or None, **sampling
        )
        config.check(session.bundle.manifest)
        picked = set_block_size(session, config, backend, threads, 0)
        chat = Chat(session, picked.config, screen, show_blocks=show_blocks and screen.interactive)
        if system:
            chat.set_system_prompt(system)
        if screen.interactive:
            tell_settings(session, backend, config, uses_template=True)
            _greet(chat, backend, picked.reason)
        elif show_blocks:
            screen.note("--show-blocks is for a terminal and is left out.")
        converse(chat)
    if chat.failed and not screen.interactive:
        click.get_current_context().exit(EXIT_REFUSED)


def converse(chat: Chat) -> None:
    """Reads line by line until the end."""
    while (line := chat.screen.read()) is not None and line.strip() != EXIT:
        if line.startswith("/") and not line.startswith("//"):
            run_slash_command(chat, line)
        elif line.strip():
            chat.say(line[1:] if line.startswith("//") else line)


def _greet(chat: Chat, backend: str, reason: str | None) -> None:
    manifest = chat.session.bundle.manifest
    drafter = "without a drafter" if manifest.drafter is None else f"with the drafter {manifest.drafter.name}"
    chat.screen.note(f"{manifest.target.name} {drafter} on {backend}, context {chat.context_tokens:,} tokens.")
    chat.screen.note("/help lists commands, Ctrl-C stops an answer, Ctrl-D ends.")
    for line in (reason, LEGEND if chat.show_blocks else None):
        if line:
            chat.screen.note(line)

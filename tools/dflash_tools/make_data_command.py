"""`dflash-export make-data`: what a target says to a file of prompts, and its taps, for training a drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from dflash_tools.error_lines import DFlashCommand, needs_extra
from dflash_tools.option_values import read_template_args
from dflash_tools.progress import ProgressLine
from dflash_tools.sizes import bytes_text


@click.command("make-data", cls=DFlashCommand, short_help="Collect a target's answers to prompts, for training.")
@click.option("--target", required=True, help="Catalog name, Hugging Face id (a revision after @), or folder.")
@click.option(
    "--prompts",
    "prompt_file",
    type=click.Path(path_type=Path),
    required=True,
    help="Prompts, one a line: .txt, or .jsonl with strings, messages or objects.",
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of answers and taps.")
@click.option("--field", default="prompt", show_default=True, help="Key of the prompt in a JSON object.")
@click.option("--raw", is_flag=True, help="Do not apply the chat template.")
@click.option(
    "--template-arg", "template_args", multiple=True, metavar="KEY=VALUE", help="For the chat template; repeatable."
)
@click.option("--max-new-tokens", type=click.IntRange(2), default=512, show_default=True, metavar="N")
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--batch-size", type=click.IntRange(1), default=16, show_default=True, help="Prompts at once.")
@click.option("--max-length", type=click.IntRange(8), default=3072, show_default=True, help="As for train-drafter.")
@click.option("--no-taps", is_flag=True, help="Answers only; the training makes the taps itself.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
def command(template_args: tuple[str, ...], as_json: bool, **values: Any) -> None:
    """Writes what TARGET answers to every prompt, and the taps of all texts, into a folder for train-drafter.

    A killed run goes on when it is started again with the same options.
    """
    arguments = read_template_args(template_args)
    with needs_extra("export"):
        from dflash_tools.data_making import DataOptions, make_data
    options = DataOptions(template_args=arguments, **values)
    with ProgressLine() as progress:
        result = make_data(options, progress, lambda text: click.echo(text, err=True))
    if as_json:
        click.echo(json.dumps(result))
        return
    click.echo(f"{'answers':<12}{result['num_answers']} with {result['num_answer_tokens']:,} tokens in {result['out']}")
    if result["tap_bytes"] is not None:
        click.echo(f"{'taps':<12}{bytes_text(result['tap_bytes'])}")
    click.echo(f"\nTrain: dflash-export train-drafter --target {values['target']} --data {result['out']} --out DIR")

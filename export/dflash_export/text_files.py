"""The tokenizer side of a bundle: which files travel, and when generation stops."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from dflash_export.json_file import LFS_MARK, read_json, refuse_lfs_pointer
from dflash_runtime.bundle import TextFacts
from dflash_runtime.errors import CheckpointError

TOKENIZER_FOLDER = "tokenizer"
_TEMPLATE = "chat_template.jinja"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
)


def copy_text_files(source: Path, root: Path) -> list[str]:
    """Copies tokenizer, chat template and generation config into the bundle.

    A checkpoint with only a slow tokenizer is converted by Transformers. The chat template becomes a file of its own.

    Returns:
        Names below `root` of the files written.

    Raises:
        CheckpointError: there is a tokenizer and it cannot be converted, or no chat template for plain conversations.
    """
    folder = root / TOKENIZER_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if (template := chat_template(source)) is not None:
        (folder / _TEMPLATE).write_text(template, encoding="utf-8")
    if not (folder / "tokenizer.json").is_file() and _has_slow_tokenizer(source):
        _convert_slow_tokenizer(source, folder)
    return sorted(str(p.relative_to(root).as_posix()) for p in folder.rglob("*") if p.is_file())


def chat_template(source: Path) -> str | None:
    """The checkpoint's template for plain conversations, wherever it is; None where it has none.

    A file of its own counts before the tokenizer's settings, as in Transformers; of several under names, `default`.

    Raises:
        CheckpointError: there are several and none is called default.
    """
    if (source / _TEMPLATE).is_file():
        return (source / _TEMPLATE).read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        found = _read(source / name).get("chat_template")
        if isinstance(found, list):
            named = {entry["name"]: entry["template"] for entry in found}
            if "default" not in named:
                raise CheckpointError(f"{source / name} has the chat templates {sorted(named)} and none named "
                                      "'default'. Give that name to the one for plain conversations.")
            found = named["default"]
        if found:
            return str(found)
    return None


def require_tokenizer(source: Path) -> None:
    """Reads a checkpoint's tokenizer once, where it has one, as everything that runs the bundle will.

    Raises:
        CheckpointError: it cannot be read.
    """
    path = source / "tokenizer.json"
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as stream:
        refuse_lfs_pointer(stream.read(len(LFS_MARK)), path)
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        reason = (str(error).splitlines() or ["no reason given"])[0]
        raise CheckpointError(f"{path} cannot be read as a tokenizer ({reason}). Download it again.") from error


def _has_slow_tokenizer(source: Path) -> bool:
    return any((source / name).is_file() for name in ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model"))


def _convert_slow_tokenizer(source: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, use_fast=True, local_files_only=True)
        tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    except Exception as error:
        raise CheckpointError(
            f"{source} has no tokenizer.json, and its slow tokenizer cannot be converted "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})."
        ) from error


def read_text_facts(source: Path, template_args: dict[str, Any]) -> tuple[TextFacts, list[str]]:
    """Stop tokens as `generate` of Transformers would use them, BOS and template facts.

    The generation config decides; without an end token there, config.json does.

    Returns:
        The facts, and notes for the user.
    """
    config, generation = read_json(source / "config.json"), _read(source / "generation_config.json")
    notes = []
    stops = _ids(generation.get("eos_token_id")) or _ids(config.get("eos_token_id"))
    if not stops:
        stops = _ids((config.get("text_config") or {}).get("eos_token_id"))
    if not stops:
        notes.append("the checkpoint names no end-of-sequence token: generation ends by length only")
    bos = generation.get("bos_token_id", config.get("bos_token_id"))
    facts = TextFacts(stops, bos if isinstance(bos, int) else None, chat_template(source) is not None, template_args,
                      _special_tokens(source))  # fmt: skip
    return facts, notes


def _special_tokens(source: Path) -> dict[str, str]:
    settings = {**_read(source / "special_tokens_map.json"), **_read(source / "tokenizer_config.json")}
    given = {name: settings[name] for name in _SPECIAL_TOKENS if settings.get(name)}
    return {name: token["content"] if isinstance(token, dict) else token for name, token in given.items()}


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _ids(value: Any) -> list[int]:
    if isinstance(value, int):
        return [value]
    return [int(v) for v in value] if isinstance(value, list) else []

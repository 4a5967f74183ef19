"""The tokenizer side of a bundle: which files travel, and when generation stops."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from dflash_export.json_file import read_json
from dflash_runtime.bundle import TextFacts
from dflash_runtime.errors import CheckpointError

TOKENIZER_FOLDER = "tokenizer"
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def copy_text_files(source: Path, root: Path) -> list[str]:
    """Copies tokenizer, chat template and generation config into the bundle.

    A checkpoint with only a slow tokenizer is converted by Transformers.

    Returns:
        Names below `root` of the files written.

    Raises:
        CheckpointError: there is a tokenizer and it cannot be converted.
    """
    folder = root / TOKENIZER_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    extra = source / "additional_chat_templates"
    if extra.is_dir():
        for template in sorted(extra.glob("*.jinja")):
            (folder / extra.name).mkdir(exist_ok=True)
            shutil.copyfile(template, folder / extra.name / template.name)
    if not (folder / "tokenizer.json").is_file() and _has_slow_tokenizer(source):
        _convert_slow_tokenizer(source, folder)
    return sorted(str(p.relative_to(root).as_posix()) for p in folder.rglob("*") if p.is_file())


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
    config = read_json(source / "config.json")
    generation_path = source / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    tokenizer_path = source / "tokenizer_config.json"
    tokenizer = read_json(tokenizer_path) if tokenizer_path.is_file() else {}
    notes = []
    stops = _ids(generation.get("eos_token_id")) or _ids(config.get("eos_token_id"))
    if not stops:
        stops = _ids((config.get("text_config") or {}).get("eos_token_id"))
    if not stops:
        notes.append("the checkpoint names no end-of-sequence token: generation ends by length only")
    bos = generation.get("bos_token_id", config.get("bos_token_id"))
    has_template = (
        (source / "chat_template.jinja").is_file()
        or (source / "chat_template.json").is_file()
        or bool(tokenizer.get("chat_template"))
    )
    return TextFacts(stops, bos if isinstance(bos, int) else None, has_template, template_args), notes


def _ids(value: Any) -> list[int]:
    if isinstance(value, int):
        return [value]
    return [int(v) for v in value] if isinstance(value, list) else []

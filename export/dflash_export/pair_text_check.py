"""The side of a pair that only a tokenizer shows: its tokens, mask id and thinking mode; and the catalog's word."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from dflash_export.catalog import CatalogEntry, entry_of_drafter
from dflash_export.drafter_config import DrafterConfig
from dflash_export.drafter_data_record import recorded_template_args
from dflash_export.pair_findings import ERROR, NOTE, WARNING, WRONG_PAIR, Finding, TargetSide
from dflash_runtime.errors import CheckpointError

_THINKING = "enable_thinking"
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")


class _Tokens(NamedTuple):
    by_id: dict[int, str]
    special: set[int]


def text_findings(
    target: TargetSide,
    drafter: DrafterConfig,
    drafter_folder: Path,
    drafter_id: str,
    template_args: Mapping[str, Any],
    target_ids: Tensor | None = None,
) -> list[Finding]:
    """What tokenizers, chat template and catalog say of a pair.

    Args:
        target: The target's facts.
        drafter: The drafter's facts.
        drafter_folder: Its checkpoint, for a tokenizer and a record of its training data, where it has them.
        drafter_id: What the catalog would know it by.
        template_args: Chat template arguments the user chose.
        target_ids: The target's tokens a draft vocabulary has, None for the whole vocabulary.

    Raises:
        CheckpointError: a tokenizer.json cannot be read.
    """
    entry = entry_of_drafter(drafter_id)
    tokens = _read(target.tokenizer_folder)
    if tokens is None:
        text = f"{target.name} has no tokenizer.json, so mask id and tokenizers were not looked at."
        found = [Finding(NOTE, "tokenizer", text, "", "")]
    else:
        found = _mask(target, drafter, tokens) + _tokenizers(tokens, _read(drafter_folder), drafter.mask_token_id)
    found += _thinking(target, entry, recorded_template_args(drafter_folder), template_args)
    found += [] if entry is None else _catalog(target, drafter, drafter_id, entry)
    return found + _stops(target, target_ids)


def _read(folder: Path) -> _Tokens | None:
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{file} cannot be read as a tokenizer ({error}). Download it again.") from error
    added = tokenizer.get_added_tokens_decoder()
    by_id = {i: token for token, i in tokenizer.get_vocab(with_added_tokens=True).items()}
    return _Tokens(by_id, {i for i, token in added.items() if token.special})


def _tokenizers(target: _Tokens, drafter: _Tokens | None, mask_token_id: int) -> list[Finding]:
    if drafter is None:
        return []
    one, two = dict(target.by_id), dict(drafter.by_id)
    for tokens in (one, two):
        tokens.pop(mask_token_id, None)  # it may be known to one of them only
    consequence = "The same ids mean other words: hardly a proposal would be accepted."
    if len(one) != len(two):
        text = f"the drafter's tokenizer has {len(two)} tokens and the target's {len(one)} (mask token left out)."
        return [Finding(ERROR, "tokenizer", text, consequence, WRONG_PAIR)]
    different = sorted(i for i in one if two.get(i) != one[i])
    if not different:
        return []
    first = different[0]
    text = (
        f"target and drafter give {len(different)} ids different meanings, the first is {first}: {one[first]!r} and "
        f"{two.get(first)!r}."
    )
    return [Finding(ERROR, "tokenizer", text, consequence, WRONG_PAIR)]


def _mask(target: TargetSide, drafter: DrafterConfig, tokens: _Tokens) -> list[Finding]:
    mask = drafter.mask_token_id
    word = tokens.by_id.get(mask)
    if word is None:
        return []  # a padding row of the embedding, as most drafters have it
    if mask in target.stop_token_ids:
        what = f"mask_token_id {mask} is {word!r}, a stop token of the target."
    elif mask not in tokens.special:
        what = f"mask_token_id {mask} is {word!r}, an ordinary token of the target's texts."
    else:
        text = f"mask_token_id {mask} is the target's special token {word!r}."
        return [Finding(NOTE, "mask id", text, "A prompt may hold it, and nothing goes wrong then.", "")]
    return [
        Finding(
            WARNING, "mask id", what,
            "The drafter fills every unknown slot with it; with an id it was not trained with, its proposals are poor.",
            "Compare with the config it was trained from; pad or end tokens are a common fall-back of tools that "
            "found no mask token.",
        )
    ]  # fmt: skip


def _thinking(
    target: TargetSide, entry: CatalogEntry | None, recorded: Mapping[str, Any], template_args: Mapping[str, Any]
) -> list[Finding]:
    if not any(_THINKING in text for text in _template_texts(target.tokenizer_folder)):
        return []
    thinks = recorded.get(_THINKING, entry.known.thinks if entry is not None else None)
    known = dict(entry.template_args) if entry is not None else {}
    chosen = {**known, **recorded, **template_args}.get(_THINKING)
    if thinks is None:
        if chosen is not None:
            return []
        return [
            Finding(
                NOTE, "thinking", "the target's chat template thinks by default, and whether the drafter was trained "
                "on thinking is not known here.",
                "A Qwen3-8B drafter trained without it fell from 60 % of its proposals accepted to 25 % with it.",
                "If its card says non-thinking, give --template-arg enable_thinking=false.",
            )
        ]  # fmt: skip
    if chosen is None or bool(chosen) == thinks:
        return []
    words = ("with thinking", "without thinking")[:: 1 if thinks else -1]
    return [
        Finding(
            WARNING, "thinking", f"the drafter was trained {words[0]}, and the texts will be {words[1]}.",
            "A Qwen3-8B drafter trained without it fell from 60 % of its proposals accepted to 25 % with it.",
            f"Leave out --template-arg {_THINKING}={str(bool(chosen)).lower()}.",
        )
    ]  # fmt: skip


def _template_texts(folder: Path) -> list[str]:
    files = [folder / name for name in _TEMPLATES]
    return [json.dumps(file.read_text(encoding="utf-8")) for file in files if file.is_file()]


def _catalog(target: TargetSide, drafter: DrafterConfig, drafter_id: str, entry: CatalogEntry) -> list[Finding]:
    found = []
    if "/" in target.name and target.name.lower() != entry.target.lower():
        found.append(
            Finding(
                WARNING, "target", f"{drafter_id} was published for {entry.target}, and the target is {target.name}.",
                "A drafter reads one target's layers; another's, a fine-tune's too, are accepted less.",
                f"Give {entry.target}.",
            )
        )  # fmt: skip
    known = entry.known
    pairs: list[tuple[str, Any, Any]] = [
        ("block_size", drafter.block_size, known.block_size),
        ("target_layer_ids", drafter.target_layer_ids, known.target_layer_ids),
        ("mask_token_id", drafter.mask_token_id, known.mask_token_id),
    ]
    for key, value, wanted in pairs:
        if wanted is not None and value != wanted:
            listed = [list(one) if isinstance(one, tuple) else one for one in (value, wanted)]
            found.append(
                Finding(
                    WARNING, "catalog", f"{drafter_id} states {key} {listed[0]}, and {listed[1]} is known of it.",
                    "Repositories have changed under one name before: weights and config may be of two revisions.",
                    "Pin the revision you mean with @COMMIT.",
                )
            )  # fmt: skip
    return found


def _stops(target: TargetSide, target_ids: Tensor | None) -> list[Finding]:
    if target_ids is None or not target.stop_token_ids:
        return []
    have = set(target_ids.tolist())
    missing = [i for i in target.stop_token_ids if i not in have]
    if len(missing) < len(target.stop_token_ids):
        return []
    return [
        Finding(
            NOTE, "vocabulary", f"none of the target's stop tokens {missing} is in the drafter's vocabulary.",
            "The end of an answer is never proposed, which costs its last round.", "",
        )
    ]  # fmt: skip

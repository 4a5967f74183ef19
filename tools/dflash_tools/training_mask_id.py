"""Which token id stands for "not known yet" in a block.

It must be a row of the target's own embedding table, because a drafter ships without one, and an id that no text
holds, or the drafter could not tell a known token from an unknown one. Padding and end tokens are neither.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from dflash_runtime.errors import PairError

_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")


@dataclasses.dataclass(frozen=True)
class TokenFacts:
    """What is known about a target's ids."""

    num_rows: int
    """Rows of its embedding table."""
    names: Mapping[int, str]
    """Every id the tokenizer knows."""
    special_ids: frozenset[int]
    """Special tokens among them."""
    reserved_ids: frozenset[int]
    """Ids with a role: begin, end, padding, unknown, stop tokens, tokens of the chat template."""


def read_token_facts(folder: Path, num_rows: int, stop_token_ids: Iterable[int]) -> TokenFacts:
    """Reads a checkpoint's tokenizer files.

    Args:
        folder: With `tokenizer.json`; without one nothing is known of the ids.
        num_rows: Rows of the target's embedding table.
        stop_token_ids: Tokens that end an answer.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return TokenFacts(num_rows, {}, frozenset(), frozenset(stop_token_ids))
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    names = {i: name for name, i in tokenizer.get_vocab(with_added_tokens=True).items()}
    special = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    settings = _json(folder / "tokenizer_config.json")
    roles = [settings.get(role) for role in _ROLES]
    texts = {role["content"] if isinstance(role, dict) else role for role in roles if role}
    template = "".join(p.read_text(encoding="utf-8") for p in sorted(folder.glob("chat_template*")))
    template += json.dumps(settings.get("chat_template") or "", ensure_ascii=False)
    reserved = {i for i, text in special.items() if text in texts or text in template}
    return TokenFacts(num_rows, names, frozenset(special), frozenset(reserved | set(stop_token_ids)))


def _json(path: Path) -> dict[str, object]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def choose_mask_token_id(facts: TokenFacts, used_ids: Iterable[int], wanted: int | None = None) -> int:
    """The id asked for, or the first one that no text can hold.

    A row past the tokenizer's last id comes first, as in the authors' drafters for Qwen3; then a special token
    without a role that no text holds, the last of them.

    Args:
        facts: Of the target.
        used_ids: Ids of all texts.
        wanted: The user's choice.

    Raises:
        PairError: the choice has no row in the target's table or is in use, or there is no free id.
    """
    used = set(used_ids)
    if wanted is not None:
        return _checked(wanted, facts, used)
    past_tokenizer = max(facts.names, default=-1) + 1
    without_token = [i for i in range(past_tokenizer, facts.num_rows) if facts.names and i not in used]
    if without_token:
        return without_token[0]
    free = [i for i in facts.special_ids - facts.reserved_ids - used if i < facts.num_rows]
    if not free:
        raise PairError(
            f"no id is free for the mask: the target's table has {facts.num_rows} rows, its tokenizer uses ids up to "
            f"{past_tokenizer - 1}, and every special token has a role or stands in the data. Choose a rare token "
            "with --mask-token-id."
        )
    return max(free)


def _checked(wanted: int, facts: TokenFacts, used: set[int]) -> int:
    if not 0 <= wanted < facts.num_rows:
        raise PairError(
            f"--mask-token-id {wanted} has no row in the target's embedding table, which has {facts.num_rows} (0 to "
            f"{facts.num_rows - 1}); a drafter ships no embedding of its own."
        )
    name = facts.names.get(wanted, "a row without a token")
    if wanted in facts.reserved_ids:
        raise PairError(f"--mask-token-id {wanted} is {name!r}, which has a role of its own. Choose another id.")
    if wanted in used:
        raise PairError(f"--mask-token-id {wanted} is {name!r}, which stands in the training data. Choose another id.")
    return wanted

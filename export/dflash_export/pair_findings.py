"""What the pair check says, and the facts of a target it is about."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from dflash_export.checkpoint import Checkpoint
from dflash_runtime.errors import PairError

ERROR, WARNING, NOTE = "error", "warning", "note"
SEVERITIES = (ERROR, WARNING, NOTE)
WRONG_PAIR = "Give the drafter that was trained for this target."


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing about a pair that the user should know."""

    severity: str
    """`error` (the pair cannot work), `warning` (acceptance probably suffers), `note` (worth knowing)."""
    subject: str
    """What it is about: sizes, taps, mask id, block, window, rope, thinking, vocabulary, tokenizer, ..."""
    text: str
    """What was found, with both values."""
    consequence: str
    remedy: str

    def sentence(self) -> str:
        """Everything in one line."""
        return " ".join(part for part in (self.text, self.consequence, self.remedy) if part)


@dataclasses.dataclass(frozen=True)
class TargetSide:
    """What a pair check asks of the target."""

    name: str
    """Hub id or folder name."""
    tokenizer_folder: Path
    num_layers: int
    hidden_size: int
    vocab_size: int
    model_type: str
    rope_bases: tuple[float, ...] = ()
    """Bases of its rotary embeddings; empty where they are not known."""
    stop_token_ids: tuple[int, ...] = ()
    head_has_bias: bool = False

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint, config: PreTrainedConfig, stops: Iterable[int] = ()) -> TargetSide:
        """The target of a build.

        Args:
            checkpoint: Its folder; tensors may be missing.
            config: Its configuration.
            stops: Ids of its stop tokens.
        """
        text = config.get_text_config()
        return cls(
            name=checkpoint.source.id if checkpoint.source.kind == "hub" else checkpoint.name,
            tokenizer_folder=checkpoint.folder,
            num_layers=int(text.num_hidden_layers),
            hidden_size=int(text.hidden_size),
            vocab_size=int(text.vocab_size),
            model_type=str(text.model_type),
            rope_bases=_rope_bases(text),
            stop_token_ids=tuple(stops),
            head_has_bias=any(name.endswith("lm_head.bias") for name in checkpoint.places),
        )


def _rope_bases(text: PreTrainedConfig) -> tuple[float, ...]:
    tables: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    by_layer = [table for table in tables.values() if isinstance(table, dict)]
    bases = {float(table["rope_theta"]) for table in by_layer or [tables] if table.get("rope_theta")}
    return tuple(sorted(bases))


def require_fit(findings: Iterable[Finding]) -> None:
    """Stops where a pair cannot work.

    Raises:
        PairError: with every error that was found.
    """
    errors = [finding for finding in findings if finding.severity == ERROR]
    if errors:
        raise PairError(" Also: ".join(f"{one.text} {one.remedy}" for one in errors))

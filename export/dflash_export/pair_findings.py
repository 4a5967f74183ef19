"""What the pair check says, and the facts of a target it is about."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from dflash_export.checkpoint import Checkpoint
from dflash_export.tensor_files import TensorPlace
from dflash_export.weight_store import TORCH_DTYPES
from dflash_runtime.errors import PairError

ERROR, WARNING, NOTE = "error", "warning", "note"
SEVERITIES = (ERROR, WARNING, NOTE)
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
_HEADS = ("lm_head.weight", "embed_out.weight")
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
    embedding: TensorPlace | None = None
    """Its embedding table, where the weights are at hand."""
    head: TensorPlace | None = None
    """Its output head; the embedding where they are tied."""

    @property
    def scales_its_embedding(self) -> bool:
        """Whether its embedding module multiplies the table's rows by the root of its width."""
        return self.model_type.startswith("gemma")

    @property
    def width_root(self) -> float:
        """That root, in the table's precision, as the module computes it."""
        stored = TORCH_DTYPES.get(self.embedding.dtype) if self.embedding is not None else None
        return float(torch.tensor(self.hidden_size**0.5, dtype=stored or torch.float32))

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint, config: PreTrainedConfig, stops: Iterable[int] = ()) -> TargetSide:
        """The target of a build.

        Args:
            checkpoint: Its folder; tensors may be missing.
            config: Its configuration.
            stops: Ids of its stop tokens.
        """
        text = config.get_text_config()
        embedding = _place(checkpoint, _EMBEDDINGS)
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
            embedding=embedding,
            head=_place(checkpoint, _HEADS) or embedding,
        )


def _place(checkpoint: Checkpoint, endings: tuple[str, ...]) -> TensorPlace | None:
    return next((place for name, place in checkpoint.places.items() if name.endswith(endings)), None)


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

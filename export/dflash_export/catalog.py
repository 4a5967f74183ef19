"""Short names for public pairs whose target has dense softmax attention, with what is known about each.

Facts about drafters come from their authors' papers, model cards and published copies of their configs; `check-pair`
compares them with the checkpoint at hand, because repositories have been seen to change under one name. A revision
is pinned where one is known to be right; a bundle records the commit it was made from either way.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

_SHIPPED = "shipped:"


@dataclasses.dataclass(frozen=True)
class KnownDrafter:
    """What its authors say of a published drafter; None where nothing was found."""

    block_size: int | None = None
    target_layer_ids: tuple[int, ...] | None = None
    """0-based, as z-lab counts them."""
    mask_token_id: int | None = None
    thinks: bool | None = None
    """Whether the answers it was trained on were written with thinking on."""


@dataclasses.dataclass(frozen=True)
class CatalogEntry:
    """One target and, where one is published, its drafter."""

    target: str
    """Hugging Face id, or `shipped:` and a folder that is part of this package."""
    drafter: str | None = None
    template_args: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Chat template arguments the drafter was trained with."""
    note: str = ""
    known: KnownDrafter = KnownDrafter()
    target_revision: str | None = None
    """Commit or tag to take; None for the newest."""
    drafter_revision: str | None = None

    def reference(self, role: str) -> str | None:
        """Id of the target or the drafter (`role`), its pin after `@`; None where no drafter is published."""
        found, pin = (
            (self.target, self.target_revision) if role == "target" else (self.drafter, self.drafter_revision)
        )
        return found if found is None or pin is None else f"{found}@{pin}"


_NO_THINKING = {"enable_thinking": False}
_UNPUBLISHED = "nobody has published a DFlash drafter for it"
_QWEN3_TAPS = (1, 9, 17, 25, 33)
_GEMMA_31B = "google/gemma-4-31B-it"
# Commits that published measurements of these pairs name again and again.
_QWEN3_4B_PIN = "1cfa9a7208912126459214e8b04321603b3df60c"
_QWEN3_8B_PIN = "b968826d9c46dd6066d109eabc6255188de91218"

CATALOG: dict[str, CatalogEntry] = {
    "demo": CatalogEntry("shipped:demo/target", "shipped:demo/drafter"),
    "qwen2-7b": CatalogEntry("Qwen/Qwen2-7B-Instruct", note=_UNPUBLISHED),
    "qwen2.5-7b": CatalogEntry("Qwen/Qwen2.5-7B-Instruct", note=_UNPUBLISHED),
    "qwen2.5-1.5b": CatalogEntry("Qwen/Qwen2.5-1.5B-Instruct", note=_UNPUBLISHED),
    "qwen2.5-0.5b": CatalogEntry("Qwen/Qwen2.5-0.5B-Instruct", note=_UNPUBLISHED),
    "qwen3-4b": CatalogEntry(
        "Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16", _NO_THINKING,
        known=KnownDrafter(16, _QWEN3_TAPS, 151669, thinks=False),
        target_revision=_QWEN3_4B_PIN, drafter_revision="b74e3a329c4d963783143b1e970d95b002be72bd",
    ),
    "qwen3-4b-dflash2": CatalogEntry(
        "Qwen/Qwen3-4B", "RedHatAI/Qwen3-4B-speculator.dflash2", target_revision=_QWEN3_4B_PIN
    ),
    "qwen3-8b": CatalogEntry(
        "Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16", _NO_THINKING,
        known=KnownDrafter(16, _QWEN3_TAPS, 151669, thinks=False),
        target_revision=_QWEN3_8B_PIN, drafter_revision="9b41424b7109f9c5413454f481b09a82b85333f4",
    ),
    "qwen3-8b-speculators": CatalogEntry(
        "Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.dflash", known=KnownDrafter(block_size=16),
        target_revision=_QWEN3_8B_PIN, drafter_revision="1a11b170eb65c8a62c80ecd01dfe22a5907298e6",
    ),
    "qwen3-8b-dflash2": CatalogEntry(
        "Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.dflash2", _NO_THINKING,
        known=KnownDrafter(block_size=16, thinks=False), target_revision=_QWEN3_8B_PIN,
    ),
    "llama-3.1-8b": CatalogEntry(
        "meta-llama/Llama-3.1-8B-Instruct", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
        known=KnownDrafter(10, (1, 8, 15, 22, 29)), drafter_revision="d3af30def9601abdd10810aba220d692f0e803f0",
    ),
    "gemma-4-12b": CatalogEntry("google/gemma-4-12B-it", "z-lab/gemma4-12B-it-DFlash"),
    "gemma-4-31b": CatalogEntry(
        _GEMMA_31B, "z-lab/gemma-4-31B-it-DFlash", known=KnownDrafter(16, (1, 12, 23, 35, 46, 57), 4)
    ),
    "gemma-4-31b-speculators": CatalogEntry(
        _GEMMA_31B, "RedHatAI/gemma-4-31B-it-speculator.dflash", known=KnownDrafter(thinks=False)
    ),
    "gemma-4-31b-dflash2": CatalogEntry(
        _GEMMA_31B, "RedHatAI/gemma-4-31B-it-speculator.dflash2",
        known=KnownDrafter(8, (0, 16, 28, 46, 58), thinks=True),
    ),
    "smollm2-135m": CatalogEntry("HuggingFaceTB/SmolLM2-135M-Instruct", "shipped:smollm2-135m-instruct/drafter"),
}  # fmt: skip

_RECURRENT = "its linear-attention layers keep a recurrent state, which cannot be rolled back to an earlier token"
_SHARED_KV = "some of its layers read the KV cache of another layer (KV sharing)"
_HYBRIDS = (
    "qwen3.5-0.8b", "qwen3.5-4b", "qwen3.5-9b", "qwen3.5-27b", "qwen3.5-35b-a3b", "qwen3.5-122b-a10b",
    "qwen3.5-397b-a17b", "qwen3.6-27b", "qwen3.6-35b-a3b", "qwen3.8-27b", "qwen3-coder-next",
    "nemotron-3.5-lightning-30b-a3b",
)  # fmt: skip
NOT_SERVED: dict[str, str] = {
    **dict.fromkeys(_HYBRIDS, _RECURRENT),
    **dict.fromkeys(("gemma-4-e2b", "gemma-4-e4b"), _SHARED_KV),
    **dict.fromkeys(("glm-5.1", "deepseek-v4-flash"), "its attention reads only the keys an indexer picks"),
    **dict.fromkeys(("gpt-oss-20b", "gpt-oss-120b"), "its weights are published in MXFP4, which is not taken"),
    "muse-glimmer-30b": "Transformers has no causal-LM class for it",
}
"""Targets with a public drafter that are not exported, and why."""


def shipped_folder(reference: str) -> Path | None:
    """Where a checkpoint that comes with this package lies; None for any other reference."""
    if not reference.startswith(_SHIPPED):
        return None
    return Path(__file__).parent / "shipped" / reference.removeprefix(_SHIPPED)


def entry_of_drafter(drafter_id: str) -> CatalogEntry | None:
    """The entry a published drafter stands in, None for any other."""
    return next((entry for entry in CATALOG.values() if entry.drafter == drafter_id), None)


def drafter_template_args(drafter_id: str) -> dict[str, Any]:
    """Template arguments a published drafter was trained with, {} when nothing is known."""
    entry = entry_of_drafter(drafter_id)
    return {} if entry is None else dict(entry.template_args)

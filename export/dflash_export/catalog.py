"""Short names for public pairs, with what is known about each. One table, nothing hidden."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

_SHIPPED = "shipped:"


@dataclasses.dataclass(frozen=True)
class CatalogEntry:
    """One target and, where one is published, its drafter."""

    target: str
    """Hugging Face id, or `shipped:` and a folder that is part of this package."""
    drafter: str | None = None
    template_args: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Chat template arguments the drafter was trained with."""
    note: str = ""


_NO_THINKING = {"enable_thinking": False}

CATALOG: dict[str, CatalogEntry] = {
    "demo": CatalogEntry("shipped:demo/target", "shipped:demo/drafter"),
    "qwen2-7b": CatalogEntry("Qwen/Qwen2-7B-Instruct", note="nobody has published a DFlash drafter for it"),
    "qwen2.5-7b": CatalogEntry("Qwen/Qwen2.5-7B-Instruct", note="nobody has published a DFlash drafter for it"),
    "qwen2.5-1.5b": CatalogEntry("Qwen/Qwen2.5-1.5B-Instruct", note="nobody has published a DFlash drafter for it"),
    "qwen2.5-0.5b": CatalogEntry("Qwen/Qwen2.5-0.5B-Instruct", note="nobody has published a DFlash drafter for it"),
    "qwen3-4b": CatalogEntry("Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16", _NO_THINKING),
    "qwen3-8b": CatalogEntry("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16", _NO_THINKING),
    "llama-3.1-8b": CatalogEntry("meta-llama/Llama-3.1-8B-Instruct", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"),
    "smollm2-135m": CatalogEntry(
        "HuggingFaceTB/SmolLM2-135M-Instruct", note="nobody has published a DFlash drafter for it"
    ),
}


def shipped_folder(reference: str) -> Path | None:
    """Where a checkpoint that comes with this package lies; None for any other reference."""
    if not reference.startswith(_SHIPPED):
        return None
    return Path(__file__).parent / "shipped" / reference.removeprefix(_SHIPPED)


def drafter_template_args(drafter_id: str) -> dict[str, Any]:
    """Template arguments a published drafter was trained with, {} when nothing is known."""
    for entry in CATALOG.values():
        if entry.drafter == drafter_id:
            return dict(entry.template_args)
    return {}

"""The layouts drafter checkpoints come in, each turned into z-lab's keys and tensor names.

| layout | recognised by | written by |
|---|---|---|
| z-lab | `architectures` or `dflash_config` | z-lab, SpecForge, Model Optimizer, this program |
| speculators | `speculators_model_type` | speculators |
| assistant | `model_type` muse_glimmer_assistant | Transformers |

Everything behind this package knows z-lab's spelling alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_export.drafter_layouts.assistant import ASSISTANT
from dflash_export.drafter_layouts.layout import Layout
from dflash_export.drafter_layouts.speculators import SPECULATORS
from dflash_export.drafter_layouts.zlab import ZLAB

LAYOUTS = (SPECULATORS, ASSISTANT, ZLAB)
"""In the order they are tried; the last one takes what no marker claims."""


def find_layout(config: Mapping[str, Any]) -> Layout:
    """The layout a config.json is written in."""
    return next(layout for layout in LAYOUTS if layout.recognises(config))


def layout_named(name: str) -> Layout:
    """The layout of a name that `DrafterConfig.layout` holds."""
    return next(layout for layout in LAYOUTS if layout.name == name)

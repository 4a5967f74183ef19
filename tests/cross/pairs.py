"""Small random pairs, and how they become bundles: quickly by export and lowering, or by the whole build."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from tiny_models import favour_few_tokens, write_drafter, write_target

from dflash_engines.ort_cpu import lower_bundle
from dflash_export.build import export_bundle
from dflash_export.build_plan import BuildOptions, plan_build
from dflash_tools.pipeline import build

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclasses.dataclass(frozen=True)
class Pair:
    """A target and a drafter by their differences from the fixtures' defaults."""

    name: str
    kind: str = "qwen3"
    target: dict[str, Any] = dataclasses.field(default_factory=dict)
    drafter: dict[str, Any] = dataclasses.field(default_factory=dict)
    likely_tokens: int = 0
    """Only so many tokens can win, which makes a random drafter right now and then; 0 leaves the head as it is."""
    precision: str | None = None
    max_context_tokens: int | None = None

    def options(self, folder: Path) -> BuildOptions:
        """What to build from the checkpoints in `folder`."""
        return BuildOptions(
            str(folder / "target"),
            str(folder / "drafter"),
            precision=self.precision,
            max_context_tokens=self.max_context_tokens,
        )

    def write(self, folder: Path) -> None:
        """Writes `target` and `drafter` below `folder`."""
        config = write_target(folder / "target", self.kind, **self.target)
        if self.likely_tokens:
            favour_few_tokens(folder / "target", self.likely_tokens)
        write_drafter(folder / "drafter", config, **self.drafter)


# Taps never include the target's last layer, which the authors read after the final norm.
AUTHOR_PAIRS = [
    Pair("qwen3"),
    Pair(
        "qwen3-window",
        drafter={"layer_types": [SLIDING, FULL], "sliding_window": 8, "block_size": 8},
        likely_tokens=3,
    ),
    Pair(
        "qwen3-untied-block-16",
        target={"tie_word_embeddings": False, "num_key_value_heads": 4},
        drafter={"taps": (1,), "layers": 3, "block_size": 16, "spelling": "flat"},
        likely_tokens=2,
    ),
    Pair(
        "qwen3-window-both-ways",
        target={"num_key_value_heads": 1},
        drafter={"layer_types": [SLIDING, SLIDING], "sliding_window": 6, "is_causal": False, "block_size": 5},
        likely_tokens=3,
    ),
    Pair(
        "qwen3-target-window",
        target={"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
        drafter={"attention_bias": True, "taps": (2, 0, 1), "num_key_value_heads": 4},
        likely_tokens=3,
    ),
    Pair("qwen2", "qwen2", drafter={"taps": (1, 0)}, likely_tokens=3),
    Pair(
        "qwen2-untied-block-2",
        "qwen2",
        target={"tie_word_embeddings": False, "num_key_value_heads": 2},
        drafter={"taps": (0, 1), "block_size": 2, "attention_bias": True, "num_key_value_heads": 1},
        likely_tokens=2,
    ),
    Pair(
        "qwen2-scaled",
        "qwen2",
        drafter={
            "taps": (0,), "input_embedding_scale": 3.0, "output_multiplier": 0.5, "final_logit_softcapping": 2.0,
        },
        likely_tokens=4,
    ),
    Pair("llama", "llama", drafter={"taps": (0,), "block_size": 8, "is_causal": True}, likely_tokens=3),
    Pair(
        "llama-tied",
        "llama",
        target={"tie_word_embeddings": True, "num_key_value_heads": 4, "attention_bias": True},
        drafter={"taps": (0,), "layers": 1, "rope_theta": 1e6, "spelling": "nested-block"},
        likely_tokens=3,
    ),
    Pair(
        "llama-six-layers",
        "llama",
        target={"num_hidden_layers": 6, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3},
        drafter={"taps": (1, 3, 4), "block_size": 6, "layer_types": [FULL, SLIDING], "sliding_window": 12},
        likely_tokens=3,
    ),
    Pair(
        "llama-yarn",
        "llama",
        target={
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            },
        },
        drafter={
            "taps": (0,),
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        },
        likely_tokens=3,
    ),
]


MAIN = Pair(
    "main",
    drafter={"layer_types": [SLIDING, FULL], "sliding_window": 16, "block_size": 16},
    likely_tokens=3,
    max_context_tokens=160,
)
"""The pair most tests share: windows, every block size, proposals accepted now and then."""
HALF_PAIRS = [dataclasses.replace(MAIN, name=f"main-{p}", precision=p) for p in ("bf16", "fp16")]

_SHALLOW = Pair(
    "shallow",
    target={"num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    drafter={"layer_types": [SLIDING, FULL], "sliding_window": 16, "block_size": 16, "taps": (0,)},
    max_context_tokens=160,
)
SHALLOW_PAIRS = [dataclasses.replace(_SHALLOW, name=f"shallow-{p}", precision=p) for p in ("bf16", "fp16")]
"""The least that has a full layer and one with a window in both models: engines of it build in a second or two."""


def quiet(stage: str, done: int, total: int) -> None:
    """A progress callback that shows nothing."""


def export_quickly(pair: Pair, folder: Path) -> Path:
    """Exports and lowers a pair without the gate; returns the bundle."""
    pair.write(folder)
    root = folder / "bundle"
    root.mkdir()
    export_bundle(plan_build(pair.options(folder)), root, quiet)
    lower_bundle(root)
    return root


def build_fully(pair: Pair, folder: Path) -> Path:
    """Builds a pair as the command does; returns the bundle."""
    pair.write(folder)
    build(pair.options(folder), folder / "bundle", "ort-cpu", quiet)
    return folder / "bundle"

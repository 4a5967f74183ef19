"""What a build says where it did not measure what quantisation costs."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from dflash_export.evidence import Quality, QuantizedQuality, TargetEvidence
from dflash_export.gate import fits_memory
from dflash_export.quality_notes import unmeasured
from dflash_export.quantized_places import ROUND_TO_NEAREST

TARGET, DRAFTER = "model.layers.0.mlp.up_proj.weight", "drafter.layers.0.mlp.up_proj.weight"


def manifest(target: str | None = None, drafter: str | None = None) -> Any:
    """Of weights that these made."""
    origins = {name: origin for name, origin in ((TARGET, target), (DRAFTER, drafter)) if origin is not None}
    quantized = {name: SimpleNamespace(origin=origin) for name, origin in origins.items()}
    return SimpleNamespace(quantized=quantized, drafter=drafter)


def evidence(perplexity: float | None = 8.0) -> TargetEvidence:
    """Of a model that was run whole."""
    quality = Quality(perplexity, [])
    quantized = QuantizedQuality(100, quality, quality, (torch.zeros(1), torch.zeros(1)))
    return TargetEvidence([], [], None, [], [], np.zeros(0), quantized)


def test_nothing_is_said_where_nothing_is_missing() -> None:
    assert unmeasured(manifest(), None, 1e9) == []
    assert unmeasured(manifest(ROUND_TO_NEAREST, ROUND_TO_NEAREST), evidence(), 1e9) == []


def test_layers_alone_name_the_option_and_what_it_takes() -> None:
    (note,) = unmeasured(manifest(ROUND_TO_NEAREST), None, 4.2e9)
    assert "in perplexity was not measured" in note and "acceptance" not in note
    assert "the same command with --gate full measures it, and takes about 4.2 GB" in note
    (note,) = unmeasured(manifest("AWQ", ROUND_TO_NEAREST), None, 4.2e9)
    assert "in perplexity and acceptance length was not measured" in note


@pytest.mark.parametrize(
    ("given", "found", "words"),
    [
        (manifest("AWQ"), dataclasses.replace(evidence(), quantized=None), "holds what AWQ made of the weights"),
        (manifest(ROUND_TO_NEAREST), evidence(None), "perplexity was not measured, as the checkpoint has no tokenizer"),
        (manifest(ROUND_TO_NEAREST, "GPTQ"), evidence(), "the drafter's checkpoint holds what GPTQ made"),
    ],
)
def test_what_nobody_can_measure_is_said(given: Any, found: TargetEvidence, words: str) -> None:
    (note,) = unmeasured(given, found, 1e9)
    assert words in note


@pytest.mark.parametrize("origin", [None, ROUND_TO_NEAREST])
def test_a_quantised_model_takes_more_memory_to_run_whole(origin: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2-135M's size: in floats it is compared whole within 1.5 GB; its int4 took 2.4 GB that way."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 40))
    weights = {TARGET: SimpleNamespace(shape=[134_515_008])}
    given: Any = SimpleNamespace(weights=weights, quantized=manifest(origin).quantized, precision="fp32")
    assert fits_memory(given, "auto") == (origin is None)
    assert fits_memory(given, "full") and not fits_memory(given, "layers")

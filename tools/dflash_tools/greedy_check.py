"""The runtime's greedy tokens at the end of a build: every way of decoding against what it should say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dflash_export.deviation import Array
from dflash_export.evidence import gate_prompts
from dflash_runtime.bundle import Bundle, CheckRow, Manifest
from dflash_runtime.engine_record import open_engine
from dflash_runtime.generation import GenerationConfig
from dflash_runtime.session import Session
from dflash_tools.lowered_check import ROUNDED_TOLERANCE, exact_logits

CHECKED_TOKENS = 24


def rounds_activations(bundle: Bundle, backend: str) -> bool:
    """Whether the target's products round activations to int8, so that equal sums may be rounded to other tokens."""
    if open_engine(bundle, backend).versions.get("activations") == "fp32":
        return False
    weights, quantized = bundle.manifest.weights, bundle.manifest.quantized
    return any(not name.startswith("drafter.") and weights[name].dtype != "F8_E4M3" for name in quantized)


def check_tokens(
    root: Path, manifest: Manifest, backend: str, prompts: list[list[int]], continuations: list[list[int]]
) -> list[CheckRow]:
    """Greedy tokens, plain and drafted, against what they must be.

    Args:
        root: The bundle, with engines.
        manifest: Its manifest.
        backend: What executes.
        prompts: Token ids.
        continuations: What each prompt must be continued with; they do not stop at stop tokens.
    """
    said = _say(root, manifest, backend, prompts, [len(text) for text in continuations])
    covered = f"{sum(map(len, continuations))} greedy tokens after {len(prompts)} prompts"
    rows = []
    for name, texts in said.items():
        differing = _differing(texts, continuations)
        rows.append(CheckRow("tokens", name, float(differing), 0.0, differing == 0, covered))
    return rows


def check_own_tokens(root: Path, manifest: Manifest, backend: str) -> list[CheckRow]:
    """The same for an engine that has no text of PyTorch's to say: every way of decoding says what plain decoding says.

    Where activations are rounded, a single row and a block of rows take other kernels, whose sums differ in the last
    bits and are then rounded apart; so each token is judged by how far it falls short of the greedy choice on
    activations in fp32, relative to the root mean square of the logits.

    Args:
        root: The bundle, with engines.
        manifest: Its manifest.
        backend: What executes.
    """
    prompts = gate_prompts(root / "tokenizer" / "tokenizer.json", manifest.target.vocab_size)
    room = max(1, min(CHECKED_TOKENS, manifest.max_context_tokens - max(len(p) for p in prompts)))
    said = _say(root, manifest, backend, prompts, [room] * len(prompts))
    bundle, plain = Bundle.open(root, check_files=False), said["plain"]
    if not rounds_activations(bundle, backend):
        covered = f"{sum(map(len, plain))} greedy tokens after {len(prompts)} prompts"
        return [
            CheckRow("tokens", name, float(count), 0.0, count == 0, covered)
            for name, texts in said.items()
            for count in (_differing(texts, plain),)
        ]
    logits = exact_logits(bundle, max(len(p) for p in prompts) + room)
    rows = []
    for name, texts in said.items():
        worst = max(shortfall(logits([*p, *t])[len(p) - 1 : -1], t) for p, t in zip(prompts, texts, strict=True))
        words = f"{sum(map(len, texts))} greedy tokens after {len(prompts)} prompts, short of the best on fp32 sums"
        if name != "plain":
            words += f"; {_differing(texts, plain)} other ones than in plain decoding"
        rows.append(CheckRow("tokens", name, worst, ROUNDED_TOLERANCE, worst <= ROUNDED_TOLERANCE, words))
    return rows


def shortfall(logits: Array, chosen: list[int]) -> float:
    """Most that a chosen token lies below the best one, relative to the root mean square of its row.

    Args:
        logits: [n, V], before each of the tokens.
        chosen: n token ids.
    """
    wide = logits.astype(np.float64)
    short = wide.max(-1) - wide[np.arange(len(chosen)), chosen]
    return float((short / np.sqrt((wide**2).mean(-1))).max())


def _say(
    root: Path, manifest: Manifest, backend: str, prompts: list[list[int]], counts: list[int]
) -> dict[str, list[list[int]]]:
    """What each way of decoding continues the prompts with, plain decoding first."""
    modes: list[tuple[str, dict[str, Any]]] = [("plain", {"plain": True})]
    if manifest.drafter is not None:
        modes += [(f"block size {b}", {"block_size": b}) for b in manifest.block_sizes]
    said: dict[str, list[list[int]]] = {}
    with Session.open(root, backend, prefill_chunk_tokens=8) as session:
        for name, options in modes:
            said[name] = [
                session.generate(
                    prompt, GenerationConfig(max_new_tokens=count, stop_token_ids=[], reuse_prefix=False, **options)
                ).token_ids
                for prompt, count in zip(prompts, counts, strict=True)
            ]
    return said


def _differing(found: list[list[int]], expected: list[list[int]]) -> int:
    """Tokens that are others, missing ones included."""
    return sum(
        sum(a != b for a, b in zip(one, two, strict=False)) + abs(len(one) - len(two))
        for one, two in zip(found, expected, strict=True)
    )

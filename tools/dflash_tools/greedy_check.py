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
from dflash_tools.engine_logits import portable_logits
from dflash_tools.lowered_check import allowed_rounding
from dflash_tools.reference_tensors import NEXT_COUNT, likeliest

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

    Where activations are rounded, each token is judged by how far it falls short of the greedy choice on activations
    in fp32, relative to the root mean square of the logits: a few times as far as the same rounding moves the likeliest
    tokens apart in the portable graph, on the texts of plain decoding. A row alone and a block may take other kernels,
    whose sums differ in the last bits and are then rounded apart.

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
    longest = max(len(p) for p in prompts) + room
    exact = portable_logits(bundle, longest, rounds=False)
    whole = [[*p, *t] for p, t in zip(prompts, plain, strict=True)]
    right, worst = [exact(ids) for ids in whole], dict[str, float]()
    for name, texts in said.items():
        worst[name] = max(shortfall(exact([*p, *t])[len(p) - 1 : -1], t) for p, t in zip(prompts, texts, strict=True))
    del exact  # one of both at a time is in memory
    rounded = portable_logits(bundle, longest, rounds=True)
    allowed = allowed_rounding(max(moved(rounded(ids), one) for ids, one in zip(whole, right, strict=True)))
    rows = []
    for name, texts in said.items():
        words = f"{sum(map(len, texts))} greedy tokens after {len(prompts)} prompts, short of the best on fp32 sums"
        if name != "plain":
            words += f"; {_differing(texts, plain)} other ones than in plain decoding"
        rows.append(CheckRow("tokens", name, worst[name], allowed, worst[name] <= allowed, words))
    return rows


def moved(found: Array, exact: Array) -> float:
    """Most that the best token's distance to one of the next best changes, relative to the logits' root mean square.

    Args:
        found: Logits [n, V] of the same rows.
        exact: What they should be.

    Returns:
        Infinite where a logit is not finite.
    """
    if not np.isfinite(found).all():
        return float("inf")
    ids, best = likeliest(exact)
    own = np.take_along_axis(found, ids, -1).astype(np.float64)
    changes = np.abs((best[:, :1] - best) - (own[:, :1] - own))[:, :NEXT_COUNT]
    return float(changes.max() / _size(exact))


def shortfall(logits: Array, chosen: list[int]) -> float:
    """Most that a chosen token lies below the best one, relative to the root mean square of the logits.

    Args:
        logits: [n, V], before each of the tokens.
        chosen: n token ids.
    """
    wide = logits.astype(np.float64)
    return float((wide.max(-1) - wide[np.arange(len(chosen)), chosen]).max() / _size(wide))


def _size(logits: Array) -> float:
    return float(np.sqrt((logits.astype(np.float64) ** 2).mean()))


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

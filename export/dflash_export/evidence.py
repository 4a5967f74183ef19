"""What the gate compares with: PyTorch's own outputs, taken once, before any graph is opened."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import numpy as np
import torch

from dflash_export.reference_run import Array, Step, StepOutputs, TargetReference
from dflash_export.weight_store import PRECISIONS, TORCH_DTYPES
from dflash_runtime.bundle import Manifest

GREEDY_TOKENS = 24
RUN_WINDOW_TOKENS = 512
"""Attention windows up to this width are crossed by running that many tokens."""
_SEED = 20602


@dataclasses.dataclass(frozen=True)
class TargetEvidence:
    """Reference outputs of the target for a list of calls, and greedy continuations."""

    steps: list[Step]
    exact: list[StepOutputs]
    """In fp32, on the weights as the bundle rounds them."""
    rounded: list[StepOutputs] | None
    """In the bundle's own half precision, None for fp32."""
    prompts: list[list[int]]
    continuations: list[list[int]]
    """fp32 greedy continuation of each prompt."""
    text_taps: Array
    """[rows, K*H] taps of the first prompt with its continuation: a real context for the drafter."""

    def taps(self, outputs: StepOutputs, layer_ids: list[int]) -> Array:
        """Taps [S, K*H] of one call."""
        return np.concatenate([outputs.hidden[i] for i in layer_ids], axis=-1)


def plan_steps(vocab_size: int, windows: list[int | None], max_context_tokens: int) -> list[Step]:
    """Calls that would expose a wrong mask, position, window or rollback.

    A prefill, blocks on a filled cache, a rollback inside the block before, single tokens, and a block across
    every window edge that is near enough to reach.
    """
    rng = random.Random(_SEED)
    edges = [w for w in windows if w is not None and w <= RUN_WINDOW_TOKENS]
    start = min(max([11, *(w - 2 for w in edges)]), max(1, max_context_tokens - 24))
    plan = [(0, start), (start, 4), (start + 1, 4), (start + 5, 1), (start + 4, 8), (start + 12, 1)]
    plan = [(p, n) for p, n in plan if p + n <= max_context_tokens] or [(0, 1)]
    return [Step(p, [rng.randrange(vocab_size) for _ in range(n)]) for p, n in plan]


def gather_target_evidence(folder: Path, manifest: Manifest, prompts: list[list[int]]) -> TargetEvidence:
    """Runs the checkpoint in PyTorch: the planned calls in fp32 and in the bundle's precision, then greedy text.

    Args:
        folder: The target's checkpoint.
        manifest: For precision, windows and context.
        prompts: Token ids to continue greedily, at least one.
    """
    windows = [tensor.window_tokens for tensor in manifest.target.graph.state]
    steps = plan_steps(manifest.target.vocab_size, windows, manifest.max_context_tokens)
    dtype = TORCH_DTYPES[PRECISIONS[manifest.precision]]
    reference = TargetReference.load(folder, dtype)
    rounded = None
    if dtype is not torch.float32:
        rounded = [reference.run(step) for step in steps]
        reference.model.float()
        reference.reset()
    exact = [reference.run(step) for step in steps]
    room = max(1, min(GREEDY_TOKENS, manifest.max_context_tokens - max(len(p) for p in prompts)))
    continuations = [reference.greedy(prompt, room) for prompt in prompts]
    reference.reset()
    text = reference.run(Step(0, (prompts[0] + continuations[0])[: manifest.max_context_tokens]))
    taps = np.concatenate([text.hidden[i] for i in manifest.taps.layer_ids], axis=-1)
    return TargetEvidence(steps, exact, rounded, prompts, continuations, taps)


def gate_prompts(tokenizer_file: Path, vocab_size: int) -> list[list[int]]:
    """Two short prompts: real text where the checkpoint has a tokenizer, else random ids."""
    if tokenizer_file.is_file():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(tokenizer_file))
        texts = ("def fibonacci(n):\n", "The capital of France is")
        prompts = [tokenizer.encode(text).ids for text in texts]
        if all(ids and max(ids) < vocab_size for ids in prompts):
            return [list(ids) for ids in prompts]
    rng = random.Random(_SEED + 1)
    return [[rng.randrange(vocab_size) for _ in range(n)] for n in (7, 12)]

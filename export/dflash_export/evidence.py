"""What the gate compares with: PyTorch's own outputs, taken once, before any graph is opened."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dflash_export.checkpoint import find_checkpoint, read_target_config
from dflash_export.dequantized_weights import put_all_weights, put_dequantized
from dflash_export.drafter_weights import PREFIX
from dflash_export.quality import perplexity, text_windows
from dflash_export.quantized_places import ROUND_TO_NEAREST
from dflash_export.reference_run import Array, Step, StepOutputs, TargetReference
from dflash_export.text_run import TextRun, logits_of, run_texts
from dflash_export.weight_store import PRECISIONS, TORCH_DTYPES
from dflash_runtime.bundle import Manifest

GREEDY_TOKENS = 24
RUN_WINDOW_TOKENS = 512
"""Attention windows up to this width are crossed by running that many tokens."""
_SEED = 20602


@dataclasses.dataclass(frozen=True)
class Quality:
    """What a user notices of a target, in PyTorch and fp32."""

    perplexity: float | None
    """On the fixed text; None without a tokenizer for it."""
    texts: TextRun


@dataclasses.dataclass(frozen=True)
class QuantizedQuality:
    """A target before and after quantisation."""

    window_tokens: int
    """Tokens of the fixed text."""
    original: Quality
    quantized: Quality
    original_tables: tuple[Tensor, Tensor]
    """Embedding and head, which a drafter borrows."""


@dataclasses.dataclass(frozen=True)
class TargetEvidence:
    """Reference outputs of the target for a list of calls, and greedy continuations."""

    steps: list[Step]
    exact: list[StepOutputs]
    """In fp32, on the weights as the bundle rounds them."""
    rounded: list[StepOutputs] | None
    """In the bundle's own half precision, None for fp32; in bf16 where PyTorch overflows in fp16."""
    prompts: list[list[int]]
    continuations: list[list[int]]
    """fp32 greedy continuation of each prompt."""
    text_taps: Array
    """[rows, K*H] taps of the first prompt with its continuation: a real context for the drafter."""
    quantized: QuantizedQuality | None = None
    """Beside the original; None where nothing is quantised here."""

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


def gather_target_evidence(
    folder: Path, manifest: Manifest, prompts: list[list[int]], root: Path | None = None
) -> TargetEvidence:
    """Runs the checkpoint in PyTorch: the planned calls in fp32 and in the bundle's precision, then greedy text.

    Args:
        folder: The target's checkpoint.
        manifest: For precision, windows and context.
        prompts: Token ids to continue greedily, at least one.
        root: The bundle, whose quantised weights take the place of the checkpoint's; None for one that has none.
    """
    windows = [tensor.window_tokens for tensor in manifest.target.graph.state]
    steps = plan_steps(manifest.target.vocab_size, windows, manifest.max_context_tokens)
    dtype = TORCH_DTYPES[PRECISIONS[manifest.precision]]
    imported = root is not None and any(
        facts.origin != ROUND_TO_NEAREST for name, facts in manifest.quantized.items() if not name.startswith(PREFIX)
    )
    quality, original = None, None
    if root is not None and not imported:
        original = _Original.measure(folder, manifest, prompts, root)

    def load() -> TargetReference:
        return _load_imported(folder, dtype, root, manifest) if imported else TargetReference.load(folder, dtype)

    reference, rounded = load(), None
    if dtype is not torch.float32:
        rounded = _run_rounded(reference, steps, manifest, root, dtype)
        if dtype is torch.float16 and not all(np.isfinite(one.logits).all() for one in rounded):
            for parameter in reference.model.parameters():  # not the rotary buffers, which stay in fp32
                if parameter.dtype is dtype:
                    parameter.data = parameter.data.to(torch.bfloat16)
            rounded = _run_rounded(reference, steps, manifest, root, torch.bfloat16)
            reference = load()
        reference.model.float()
        reference.reset()
    if root is not None:
        put_dequantized(reference.model, root, manifest, torch.float32)
    if original is not None:
        quality = original.beside(_measure(reference, manifest, prompts, original.windows))
        reference.reset()
    exact = [reference.run(step) for step in steps]
    room = max(1, min(GREEDY_TOKENS, manifest.max_context_tokens - max(len(p) for p in prompts)))
    continuations = [reference.greedy(prompt, room) for prompt in prompts]
    reference.reset()
    said = reference.run(Step(0, (prompts[0] + continuations[0])[: manifest.max_context_tokens]))
    taps = np.concatenate([said.hidden[i] for i in manifest.taps.layer_ids], axis=-1)
    return TargetEvidence(steps, exact, rounded, prompts, continuations, taps, quality)


def _run_rounded(
    reference: TargetReference, steps: list[Step], manifest: Manifest, root: Path | None, dtype: torch.dtype
) -> list[StepOutputs]:
    """The calls of a model in half precision, its quantised weights in it too."""
    reference.reset()
    if root is not None:
        put_dequantized(reference.model, root, manifest, dtype)
    return [reference.run(step) for step in steps]


@dataclasses.dataclass(frozen=True)
class _Original:
    windows: list[list[int]]
    quality: Quality
    tables: tuple[Tensor, Tensor]

    @classmethod
    def measure(cls, folder: Path, manifest: Manifest, prompts: list[list[int]], root: Path) -> _Original:
        """Runs the checkpoint as it is."""
        target, reference = manifest.target, TargetReference.load(folder, torch.float32)
        file = root / "tokenizer" / "tokenizer.json"
        windows = text_windows(file, target.vocab_size, manifest.max_context_tokens)
        weights = dict(reference.model.named_parameters())
        tables = weights[target.embedding_weight].detach(), weights[target.head_weight].detach()
        return cls(windows, _measure(reference, manifest, prompts, windows), tables)

    def beside(self, quantized: Quality) -> QuantizedQuality:
        """With what was measured of the quantised weights."""
        return QuantizedQuality(sum(len(w) for w in self.windows), self.quality, quantized, self.tables)


def _measure(
    reference: TargetReference, manifest: Manifest, prompts: list[list[int]], windows: list[list[int]]
) -> Quality:
    found = perplexity(windows, logits_of(reference)) if windows else None
    return Quality(found, run_texts(reference, prompts, manifest.taps.layer_ids, manifest.max_context_tokens))


def _load_imported(folder: Path, dtype: torch.dtype, root: Path | None, manifest: Manifest) -> TargetReference:
    """The plain module with the bundle's weights; that they are the checkpoint's is what the import has to see to."""
    assert root is not None
    reference = TargetReference.hollow(
        read_target_config(find_checkpoint(str(folder), role="target"), quantized=True), dtype
    )
    put_all_weights(reference.model, root, manifest)
    return reference


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

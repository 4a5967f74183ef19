"""Logits of a bundle's target: as its engine gives them, and as the portable graph does, with and without rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dflash_export.deviation import Array
from dflash_export.graph_runner import GraphRunner
from dflash_export.quality import perplexity, perplexity_row, text_windows
from dflash_runtime.bundle import Bundle, CheckRow
from dflash_runtime.errors import BundleError
from dflash_tools.lowered_check import Call, open_lowered, open_portable


def check_perplexity(bundle: Bundle, backend: str, original: float) -> CheckRow:
    """Perplexity of the engine itself on the fixed text of the build.

    Args:
        bundle: With engines for `backend` and a tokenizer.
        backend: `ort-cpu`.
        original: Perplexity of the original checkpoint.
    """
    found, count = engine_perplexity(bundle, backend)
    return perplexity_row(f"perplexity {backend}", original, found, count, "as the engine runs")


def engine_perplexity(bundle: Bundle, backend: str) -> tuple[float, int]:
    """The same as a number, and the tokens of the text.

    Raises:
        BundleError: the bundle has no tokenizer for its vocabulary, so the text cannot be put to it.
    """
    target, context = bundle.manifest.target, bundle.manifest.max_context_tokens
    windows = text_windows(bundle.path / "tokenizer" / "tokenizer.json", target.vocab_size, context)
    if not windows:
        raise BundleError(f"{bundle.path} has no tokenizer for its vocabulary; build it from a checkpoint with one.")
    longest = max(len(window) for window in windows)
    runner = open_lowered(bundle, target.graph, backend, [Call(0, {}, longest)])
    logits = lambda ids, position: _logits(runner, ids, position)  # noqa: E731
    return perplexity(windows, logits), sum(len(window) for window in windows)


def portable_logits(bundle: Bundle, most_tokens: int, *, rounds: bool) -> Callable[[Sequence[int]], Array]:
    """The portable target in fp32: token ids -> logits [n, V] from an empty cache.

    Args:
        bundle: The bundle.
        most_tokens: Of any text that is asked for.
        rounds: Round what quantised products are given, as int8 kernels do.
    """
    runner = open_portable(bundle, bundle.manifest.target.graph, [Call(0, {}, most_tokens)], rounds=rounds)
    return lambda ids: _logits(runner, ids, 0).copy()


def _logits(runner: GraphRunner, ids: Sequence[int], position: int) -> Array:
    place = {"position": np.array([position]), "logit_rows": np.arange(len(ids))}
    found: Array = runner.run(input_ids=np.array([ids]), **place)["logits"][0]
    return found

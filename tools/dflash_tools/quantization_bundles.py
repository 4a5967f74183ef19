"""The bundles that a table of quantisation compares, and what each of them is worth in text."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dflash_runtime import GenerationConfig, Session
from dflash_runtime.bundle import Bundle
from dflash_runtime.errors import DFlashError, PromptError
from dflash_tools.acceptance import mean_acceptance

KINDS: dict[str, tuple[str, ...]] = {
    "fp32": (),
    "int8": ("--quantize", "int8", "--quantize-head", "int8"),
    "int4": ("--quantize", "int4", "--quantize-head", "int4"),
}
"""What `build` is told beside the checkpoint, the precision and the drafter."""


@dataclasses.dataclass(frozen=True)
class Quality:
    """What a user notices of a bundle on `ort-cpu`."""

    perplexity: float
    """On the fixed text of the build, by the engine itself."""
    text_tokens: int
    acceptance_length: float | None
    """Committed tokens by rounds, the target's own included; None without a drafter."""
    block_size: int | None
    rounds: int


def build_bundle(
    kind: str, model: Path, drafter: str | None, out: Path, max_context_tokens: int | None = None
) -> None:
    """Builds one bundle in a process of its own, unless it is there.

    Args:
        kind: Of `KINDS`.
        model: The target's checkpoint.
        drafter: Its drafter, quantised as the target is; None for none.
        out: The bundle.
        max_context_tokens: None for the build's own choice.

    Raises:
        DFlashError: the build failed; its last line is the message.
    """
    if (out / "bundle.json").is_file():
        return
    options = list(KINDS[kind])
    if drafter is not None:
        options += ["--drafter", drafter] + (["--quantize-drafter", kind] if options else [])
    argv = [sys.executable, "-m", "dflash_tools.cli", "build", "--target", str(model), "--precision", "fp32"]
    argv += ["--gate", "full", "--out", str(out), *options]
    argv += [] if max_context_tokens is None else ["--max-context", str(max_context_tokens)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise DFlashError(f"Building {out} failed: {lines[-1].removeprefix('Error: ')}")


def measure_quality(
    folder: Path, conversations: Sequence[object], threads: int, max_new_tokens: int, block_size: int | None
) -> Quality:
    """Perplexity, and with a drafter the acceptance length of the answers to some prompts.

    Args:
        folder: The bundle, with engines for `ort-cpu`.
        conversations: Lists of a user's turns; the first of each is answered.
        threads: CPU threads.
        max_new_tokens: Of each answer.
        block_size: None for the drafter's own.

    Raises:
        PromptError: a conversation is not of a user's turns.
    """
    from dflash_tools.engine_logits import engine_perplexity

    bundle = Bundle.open(folder)
    perplexity, tokens = engine_perplexity(bundle, "ort-cpu")
    drafter = bundle.manifest.drafter
    if drafter is None:
        return Quality(perplexity, tokens, None, None, 0)
    texts = [turns[0] for turns in conversations if isinstance(turns, list) and isinstance(turns[0], str)]
    if len(texts) != len(conversations):
        raise PromptError("These prompts are messages; texts are needed.")
    size = block_size or drafter.block_size
    config = GenerationConfig(max_new_tokens=max_new_tokens, block_size=size, reuse_prefix=False)
    with Session.open(folder, "ort-cpu", threads=threads) as session:
        lengths = [session.generate(text, config).acceptance_lengths for text in texts]
    mean = mean_acceptance(lengths)
    return Quality(perplexity, tokens, None if mean is None else mean.over_rounds, size, sum(map(len, lengths)))


def weight_bytes(bundle: Bundle) -> int:
    """Of target and drafter as they are stored."""
    return sum(entry.length_bytes for entry in bundle.manifest.weights.values())

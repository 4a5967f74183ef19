"""The authors' own loop and drafter, as the oracle: tokens, proposals and accepted counts, round by round."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from dflash_runtime import GenerationResult


class Rounds(NamedTuple):
    """A whole request."""

    token_ids: list[int]
    acceptance_lengths: list[int]
    proposed_ids: list[list[int]]


class Authors:
    """A target of Transformers and a drafter of the `dflash` package, in fp32 on the CPU."""

    def __init__(self, checkpoints: Path) -> None:
        import dflash.model

        torch.set_num_threads(1)  # tiny matrices: threads only wait for each other
        dflash.model._cuda_time = time.perf_counter
        self._generate = dflash.model.dflash_generate
        self.target = AutoModelForCausalLM.from_pretrained(checkpoints / "target", dtype=torch.float32).eval()
        config = json.loads((checkpoints / "drafter" / "config.json").read_text(encoding="utf-8"))
        kind = getattr(dflash.model, config["architectures"][0])
        self.drafter: Any = kind.from_pretrained(checkpoints / "drafter", dtype=torch.float32).eval()

    def run(
        self,
        prompt: list[int],
        max_new_tokens: int,
        stop_token_ids: list[int] | None = None,
        block_size: int | None = None,
    ) -> Rounds:
        """One greedy request. What the target is called with after the prompt is anchor and proposals."""
        calls: list[list[int]] = []
        hook = self.target.register_forward_pre_hook(lambda module, args: calls.append(args[0][0].tolist()))
        try:
            found = self._generate(
                self.drafter, self.target, torch.tensor([prompt]), max_new_tokens, stop_token_ids,
                block_size=block_size, return_stats=True,
            )  # fmt: skip
        finally:
            hook.remove()
        tokens = found.output_ids[0, len(prompt) :].tolist()
        return Rounds(tokens, found.acceptance_lengths, [call[1:] for call in calls[1:]])


def differences(found: GenerationResult, expected: Rounds) -> list[str]:
    """Everything in which a request of ours is not the authors', in words."""
    words = []
    if found.token_ids != expected.token_ids:
        words.append(f"tokens {found.token_ids} instead of {expected.token_ids}")
    if found.acceptance_lengths != expected.acceptance_lengths:
        words.append(f"accepted {found.acceptance_lengths} instead of {expected.acceptance_lengths}")
    if len(found.proposed_ids) != len(expected.proposed_ids):
        words.append(f"{len(found.proposed_ids)} rounds instead of {len(expected.proposed_ids)}")
    for n, (ours, theirs) in enumerate(zip(found.proposed_ids, expected.proposed_ids, strict=False)):
        if ours != theirs:
            words.append(f"round {n} proposes {ours} instead of {theirs}")
    return words

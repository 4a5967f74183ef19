"""The authors' package as a measuring tool sees it: their loop and their drafter, in fp32 on the CPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dflash_runtime.errors import DFlashError

PACKAGE = "dflash==0.1.0"


class AuthorsAnswer(NamedTuple):
    """One request."""

    token_ids: list[int]
    acceptance_lengths: list[int]
    """Tokens committed by each round, the target's own included."""


class AuthorsLoop:
    """A target of Transformers and a drafter of the authors' package."""

    def __init__(self, target: Path, drafter: Path, threads: int | None = None) -> None:
        """Loads both checkpoints.

        Args:
            target: Checkpoint folder.
            drafter: Checkpoint folder in z-lab's format.
            threads: CPU threads; None leaves it to torch.

        Raises:
            DFlashError: the authors' package is not installed.
        """
        try:
            import dflash.model as authors
        except ModuleNotFoundError as error:
            raise DFlashError(
                f"The comparison needs the authors' package ({error.name} is missing): pip install {PACKAGE}. Leave "
                "the comparison out with --without-authors."
            ) from error
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        authors._cuda_time = time.perf_counter  # its clock asks for a GPU
        if threads is not None:
            torch.set_num_threads(threads)
        self._torch = torch
        self._generate: Any = authors.dflash_generate
        self._target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, local_files_only=True).eval()
        self._drafter = authors.DFlashDraftModel.from_pretrained(drafter, dtype=torch.float32).eval()

    def answer(
        self, ids: Sequence[int], max_new_tokens: int, stop_token_ids: Sequence[int], block_size: int
    ) -> AuthorsAnswer:
        """One greedy request."""
        with self._torch.inference_mode():
            found = self._generate(
                self._drafter, self._target, self._torch.tensor([list(ids)]), max_new_tokens, list(stop_token_ids),
                block_size=block_size, return_stats=True,
            )  # fmt: skip
        return AuthorsAnswer(found.output_ids[0, len(ids) :].tolist(), list(found.acceptance_lengths))

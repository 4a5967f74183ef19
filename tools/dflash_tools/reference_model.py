"""The model in PyTorch, as the measuring tools compare with it: fp32, greedy, Transformers' own cache."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class ReferenceModel:
    """A Hugging Face causal LM on the CPU."""

    def __init__(self, folder: Path, threads: int | None = None) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        # `past_key_values` is the name every supported Transformers knows; the newest would rather have `cache`.
        warnings.filterwarnings("ignore", message=".*past_key_values", category=FutureWarning)
        if threads is not None:
            torch.set_num_threads(threads)
        self._torch = torch
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self._model.eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def encode(self, text: str) -> list[int]:
        """Ids of a raw text."""
        return [int(token) for token in self._tokenizer(text).input_ids]

    def generate(self, ids: Sequence[int], max_new_tokens: int, stop_token_ids: Sequence[int]) -> list[int]:
        """New tokens of `transformers.generate`, greedy, the stop token included."""
        inputs = self._torch.tensor([list(ids)])
        with self._torch.inference_mode():
            output = self._model.generate(
                inputs,
                attention_mask=self._torch.ones_like(inputs),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                eos_token_id=list(stop_token_ids),
                pad_token_id=0,
            )
        return [int(token) for token in output[0, len(ids) :]]

    def timed_decode(self, ids: Sequence[int], count: int) -> tuple[list[int], float]:
        """Greedy tokens by a bare loop over the module: the fastest eager Transformers gets.

        Returns:
            `count` tokens, and milliseconds a token over all but the first.
        """
        from transformers import DynamicCache

        cache = DynamicCache(config=self._model.config)
        tokens: list[int] = []
        step = self._torch.tensor([list(ids)])
        started = 0.0
        with self._torch.inference_mode():
            for i in range(count):
                logits = self._model(step, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
                tokens.append(int(logits[0, -1].argmax()))
                step = self._torch.tensor([tokens[-1:]])
                if i == 0:
                    started = time.perf_counter()
        return tokens, 1000 * (time.perf_counter() - started) / (count - 1)

    def margin(self, ids: Sequence[int], chosen: int, other: int) -> float:
        """By how much the logit of `chosen` exceeds that of `other` after `ids`: small where a tie decides."""
        with self._torch.inference_mode():
            logits = self._model(self._torch.tensor([list(ids)]), logits_to_keep=1).logits[0, -1]
        return float(logits[chosen] - logits[other])

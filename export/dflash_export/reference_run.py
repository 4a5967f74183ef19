"""What PyTorch says: the model as Transformers itself runs it, with its own attention and a growing cache."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.cache_utils import DynamicCache

from dflash_export.hollow_model import decoder_layers
from dflash_export.rope_limits import freeze_rope

Array = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Step:
    """One call: the cache is cut to `position` rows, then `ids` are run."""

    position: int
    ids: list[int]


@dataclasses.dataclass(frozen=True)
class StepOutputs:
    """What one call gave, every tensor in fp32."""

    logits: Array
    """[S, V]"""
    hidden: Array
    """[layers, S, H] raw output of every layer."""
    keys: list[Array]
    """Per layer [kv_heads, position + S, D]"""
    values: list[Array]


class TargetReference:
    """A target in PyTorch, step by step."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.layers = decoder_layers(model, int(model.config.get_text_config().num_hidden_layers))
        self.cache: Any = DynamicCache()
        names = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype) -> TargetReference:
        """Loads a checkpoint with Transformers' eager attention."""
        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation="eager", trust_remote_code=False, local_files_only=True
            )
        model.eval()
        freeze_rope(model)
        return cls(model)

    @classmethod
    def hollow(cls, config: PreTrainedConfig, dtype: torch.dtype) -> TargetReference:
        """The same module with arbitrary weights, to be filled by the caller."""
        config = type(config).from_dict(config.to_dict())
        with quiet_transformers():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
        model.eval()
        freeze_rope(model)
        return cls(model)

    def reset(self) -> None:
        """Forgets everything."""
        self.cache = DynamicCache()

    @torch.no_grad()
    def run(self, step: Step, residual: Tensor | None = None) -> StepOutputs:
        """Runs one call, after cutting the cache to the step's position.

        Args:
            step: Position and token ids.
            residual: Residual stream [1, S, H] to use in place of the embedded tokens.
        """
        surplus = int(self.cache.get_seq_length()) - step.position
        if surplus > 0:
            self.cache.crop(-surplus)
        hidden: list[Tensor] = []

        def after(module: nn.Module, args: Any, output: Any) -> None:
            hidden.append(output[0] if isinstance(output, tuple) else output)

        hooks = [layer.register_forward_hook(after) for layer in self.layers]
        tokens = {"input_ids": torch.tensor([step.ids])} if residual is None else {"inputs_embeds": residual}
        try:
            output = self.call(step.position, **tokens)
        finally:
            for hook in hooks:
                hook.remove()
        return StepOutputs(
            logits=_numpy(output.logits[0]),
            hidden=np.stack([_numpy(h[0]) for h in hidden]),
            keys=[_numpy(layer.keys[0]) for layer in self.cache.layers if layer.is_initialized],
            values=[_numpy(layer.values[0]) for layer in self.cache.layers if layer.is_initialized],
        )

    @torch.no_grad()
    def call(self, position: int, **tokens: Tensor) -> Any:
        """One call of the module on top of the cache, all rows of a batch [B, S] at the same position.

        Args:
            position: Rows before.
            tokens: `input_ids` [B, S] or `inputs_embeds` [B, S, H].
        """
        B, S = next(iter(tokens.values())).shape[:2]
        positions = torch.arange(position, position + S).expand(B, S)
        return self.model(position_ids=positions, use_cache=True, **tokens, **{self._cache_argument: self.cache})

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Plain greedy decoding, stop tokens ignored."""
        self.reset()
        outputs = self.run(Step(0, prompt))
        tokens = [int(outputs.logits[-1].argmax())]
        while len(tokens) < num_tokens:
            outputs = self.run(Step(len(prompt) + len(tokens) - 1, [tokens[-1]]))
            tokens.append(int(outputs.logits[-1].argmax()))
        return tokens


def _numpy(tensor: Tensor) -> Array:
    return tensor.detach().float().numpy().copy()


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keeps loading bars and advice of Transformers off the terminal."""
    from transformers.utils import logging as hf_logging

    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(logging.ERROR)
    hf_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()

"""The frozen target of a training: its taps, its embedding table and its output head."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from dflash_export.build_plan import BuildOptions, TargetPlan, plan_target
from dflash_export.hollow_model import decoder_layers
from dflash_export.reference_run import quiet_transformers
from dflash_export.weight_store import TORCH_DTYPES
from dflash_runtime.errors import UnsupportedModelError


class FrozenTarget:
    """A target with its weights, for prefill passes only.

    Attributes:
        model: Transformers' own module.
        num_layers: Decoder layers.
    """

    def __init__(self, model: Any) -> None:
        self.model = model.eval().requires_grad_(False)
        self.num_layers = int(model.config.get_text_config().num_hidden_layers)
        self._layers = decoder_layers(model, self.num_layers)

    @classmethod
    def load(cls, plan: TargetPlan, device: torch.device) -> FrozenTarget:
        """Loads a found checkpoint in its own precision."""
        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(
                plan.checkpoint.folder, config=plan.config, dtype=TORCH_DTYPES[plan.weight_dtype],
                attn_implementation="sdpa", trust_remote_code=False, local_files_only=True,
            )  # fmt: skip
        return cls(model.to(device))

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        found: torch.device = next(self.model.parameters()).device
        return found

    def layer(self, index: int) -> nn.Module:
        """One decoder layer."""
        found: nn.Module = self._layers[index]
        return found

    def tables(self) -> tuple[Tensor, Tensor]:
        """The raw embedding table and the output head, [V, H] each; one tensor where they are tied.

        Raises:
            UnsupportedModelError: the head has a bias, which a drafter cannot have.
        """
        head = self.model.get_output_embeddings()
        if getattr(head, "bias", None) is not None:
            raise UnsupportedModelError("the target's output head has a bias; a DFlash drafter's head has none.")
        return self.model.get_input_embeddings().weight, head.weight

    @torch.no_grad()
    def taps(self, token_ids: Sequence[int], layer_ids: Sequence[int]) -> Tensor:
        """[S, K*H] raw outputs of the given layers over a whole text.

        Args:
            token_ids: S tokens.
            layer_ids: 0-based layers, in the order of concatenation.
        """
        ids = torch.tensor([list(token_ids)], device=self.device)
        decoder = self.model.get_decoder() if hasattr(self.model, "get_decoder") else self.model
        with self._watched(layer_ids) as seen:
            decoder(input_ids=ids, use_cache=False)
        return torch.cat([seen[i] for i in layer_ids], dim=-1)[0]

    @contextlib.contextmanager
    def _watched(self, layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        # Hooks and not `output_hidden_states`, whose last entry has already passed the final norm.
        seen: dict[int, Tensor] = {}

        def watch(index: int) -> Any:
            def after(module: nn.Module, args: Any, output: Any) -> None:
                seen[index] = output[0] if isinstance(output, tuple) else output

            return self._layers[index].register_forward_hook(after)

        hooks = [watch(i) for i in set(layer_ids)]
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()


def find_target(reference: str) -> TargetPlan:
    """Finds a target by catalog name, Hugging Face id or folder.

    Raises:
        CheckpointError: not found or damaged.
        UnsupportedModelError: a kind of model that cannot be a target.
    """
    return plan_target(BuildOptions(reference, None))


def target_digest(plan: TargetPlan) -> str:
    """Hash of a target's config, tensor headers, and the first bytes of every tensor file."""
    digest = hashlib.sha256(plan.checkpoint.source.config_sha256.encode())
    for name, place in sorted(plan.checkpoint.places.items()):
        digest.update(json.dumps([name, place.dtype, list(place.shape)]).encode())
        if place.length_bytes:
            digest.update(next(iter(place.chunks(1024)))[:1024])
    return digest.hexdigest()

"""Where a training's first weights come from: chance, the target's own layers, or a drafter trained before.

A drafter's layer has the shape of its target's layers, so it can start as a copy of one. What differs is bridged:
context rows pass no input norm, so its weight goes into the projections; query and key have norms of their own, whose
weight becomes the typical size of the target's queries and keys.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dflash_export.checkpoint import find_checkpoint
from dflash_export.drafter import Drafter
from dflash_export.drafter_config import DrafterConfig, parse_drafter_config
from dflash_export.drafter_kinds import PLAIN_ARCHITECTURE
from dflash_export.drafter_weights import read_tensor
from dflash_export.json_file import read_json
from dflash_runtime.errors import CheckpointError, PairError, UnsupportedModelError
from dflash_tools.new_drafter import own_parameters
from dflash_tools.training_target import FrozenTarget

_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_COPIED = ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm")
_HEAD_NORMS = {"self_attn.q_norm": "self_attn.q_proj", "self_attn.k_norm": "self_attn.k_proj"}


DEFAULT_LAYERS, DEFAULT_BLOCK_SIZE = 5, 16


@dataclasses.dataclass(frozen=True)
class EarlierDrafter:
    """A drafter to go on from."""

    name: str
    facts: DrafterConfig
    tensors: dict[str, Tensor]
    """By the authors' names, in fp32."""

    @property
    def sha256(self) -> str:
        """Of its weights."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.tensors.items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
        return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class DrafterShape:
    """What the new drafter is, every default settled."""

    num_layers: int
    block_size: int
    layer_ids: tuple[int, ...]
    mask_token_id: int | None
    """None: one that no text holds."""


def settle_shape(
    earlier: EarlierDrafter | None, *, num_layers: int | None, block_size: int | None,
    layer_ids: tuple[int, ...] | None, mask_token_id: int | None, default_layer_ids: Sequence[int],
) -> DrafterShape:  # fmt: skip
    """What the user gave, then what the earlier drafter is, then the defaults.

    Raises:
        PairError: the user asks for other layers, taps or mask id than the earlier drafter has.
    """
    if earlier is None:
        return DrafterShape(
            num_layers or DEFAULT_LAYERS, block_size or DEFAULT_BLOCK_SIZE, layer_ids or tuple(default_layer_ids),
            mask_token_id,
        )  # fmt: skip
    facts = earlier.facts
    asked = {
        "--layers": (num_layers, facts.num_layers), "--taps": (layer_ids, facts.target_layer_ids),
        "--mask-token-id": (mask_token_id, facts.mask_token_id),
    }  # fmt: skip
    for option, (given, there) in asked.items():
        if given is not None and given != there:
            raise PairError(f"{option} is {given} and --from {earlier.name} has {there}. Leave {option} out.")
    return DrafterShape(facts.num_layers, block_size or facts.block_size, facts.target_layer_ids, facts.mask_token_id)


def read_earlier_drafter(reference: str) -> EarlierDrafter:
    """Finds and reads a drafter's checkpoint.

    Args:
        reference: Folder, Hugging Face id, or one that comes with this package.

    Raises:
        CheckpointError: not found, damaged, or of a kind that is not trained here.
    """
    found = find_checkpoint(reference, role="drafter")
    facts = parse_drafter_config(read_json(found.folder / "config.json"), str(found.folder))
    if facts.architecture != PLAIN_ARCHITECTURE:
        raise UnsupportedModelError(
            f"--from {reference}: a drafter of kind {facts.architecture}; train-drafter trains {PLAIN_ARCHITECTURE}."
        )
    tensors = {name.removeprefix("model."): read_tensor(place).float() for name, place in found.places.items()}
    return EarlierDrafter(reference, facts, tensors)


def start_from_drafter(drafter: Drafter, earlier: EarlierDrafter) -> None:
    """Gives a new drafter the weights of an earlier one.

    Raises:
        CheckpointError: the earlier one lacks a tensor or has one of another shape; both are named.
    """
    for name, parameter in own_parameters(drafter).items():
        found = earlier.tensors.get(name)
        if found is None or found.shape != parameter.shape:
            there = "is not there" if found is None else f"is {list(found.shape)}"
            raise CheckpointError(
                f"--from {earlier.name}: {name} {there}, and this training asks for {list(parameter.shape)}. Train "
                "with the layers and taps of that drafter."
            )
        with torch.no_grad():
            parameter.copy_(found)


def start_from_target(drafter: Drafter, target: FrozenTarget, layer_ids: list[int], sample: Tensor) -> None:
    """Gives a new drafter's layers the weights of the target's last ones, and its final norm.

    The first weights of `fc` pass the last tap on.

    Args:
        drafter: With random first weights.
        target: Of the same sizes.
        layer_ids: Its taps.
        sample: [S, K*H] taps of a text, to see how large queries and keys are.

    Raises:
        UnsupportedModelError: the target's layers are built otherwise; what is missing is named.
    """
    parameters = own_parameters(drafter)
    H = drafter.config.hidden_size
    last = layer_ids.index(max(layer_ids))
    rows = sample[:, last * H : (last + 1) * H].float()
    size = rows.pow(2).mean().sqrt()
    rows = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + drafter.config.rms_norm_eps)
    first = target.num_layers - drafter.config.num_layers
    with torch.no_grad():
        for i in range(drafter.config.num_layers):
            own = {n.removeprefix(f"layers.{i}."): p for n, p in parameters.items() if n.startswith(f"layers.{i}.")}
            _copy_layer(own, _LayerWeights(target, max(0, first + i)), rows)
        decoder = target.model.get_decoder() if hasattr(target.model, "get_decoder") else target.model
        parameters["norm.weight"].copy_(_norm_weight(getattr(decoder, "norm", None), H))
        parameters["fc.weight"][:, last * H : (last + 1) * H] += torch.eye(H) / size


class _LayerWeights:
    """One layer of a target, parameter by parameter."""

    def __init__(self, target: FrozenTarget, index: int) -> None:
        self._layer = target.layer(index)
        self._found = dict(self._layer.named_parameters())
        self._index = index

    def input_norm(self, size: int) -> Tensor:
        """What the norm before the attention multiplies with."""
        return _norm_weight(getattr(self._layer, "input_layernorm", None), size)

    def get(self, name: str) -> Tensor | None:
        found = self._found.get(f"{name}.weight")
        return None if found is None else found.detach().float().cpu()

    def of(self, name: str, shape: torch.Size) -> Tensor:
        found = self.get(name)
        if found is None or found.shape != shape:
            there = "has none" if found is None else f"has {list(found.shape)}"
            raise UnsupportedModelError(
                f"--init target: a drafter's layer asks for {name}.weight of {list(shape)}, and layer {self._index} of "
                f"the target {there}. Leave --init at random."
            )
        return found


def _copy_layer(own: dict[str, nn.Parameter], theirs: _LayerWeights, rows: Tensor) -> None:
    norm = theirs.input_norm(len(own["input_layernorm.weight"]))
    own["input_layernorm.weight"].fill_(1.0)
    for name in _PROJECTIONS:
        weight = own[f"{name}.weight"]
        weight.copy_(theirs.of(name, weight.shape) * norm)
    for name in _COPIED:
        own[f"{name}.weight"].copy_(theirs.of(name, own[f"{name}.weight"].shape))
    for name, projection in _HEAD_NORMS.items():
        weight = own[f"{name}.weight"]
        found = theirs.get(name)
        typical = (rows @ own[f"{projection}.weight"].T).pow(2).mean().sqrt()
        weight.copy_(typical.expand_as(weight) if found is None else found)


def _norm_weight(norm: nn.Module | None, size: int) -> Tensor:
    """What a norm multiplies with, seen from outside: some kinds store the weight less one."""
    if norm is None:
        raise UnsupportedModelError("--init target: a norm of the target was not found. Leave --init at random.")
    parameter = next(norm.parameters())
    signs = 1 - 2 * (torch.arange(size, device=parameter.device) % 2)
    found: Tensor = norm(signs.to(parameter.dtype)) * signs
    return found.detach().float().cpu()

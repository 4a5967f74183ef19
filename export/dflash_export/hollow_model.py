"""A Hugging Face module whose parameters have shapes but no data, so its size costs nothing.

Buffers that belong to the checkpoint are parameters here too; tables the model computes itself keep their values.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, PreTrainedConfig

from dflash_export.trace_experts import EXPERTS_NAME
from dflash_runtime.errors import UnsupportedModelError


def make_hollow_model(
    config: PreTrainedConfig, dtype: torch.dtype, fake: FakeTensorMode, attention: str
) -> Any:
    """Builds the causal-LM class of a config with fake parameters and real buffers.

    Args:
        config: The target's configuration; it is copied.
        dtype: Dtype of the parameters.
        fake: The mode the parameters belong to.
        attention: Attention implementation, by Transformers' name.

    Returns:
        A Transformers module.

    Raises:
        UnsupportedModelError: Transformers has no causal-LM class for the config.
    """
    config = type(config).from_dict(config.to_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with init_empty_weights(include_buffers=False):
            model = _from_config(config, dtype, attention)
    model.eval()
    model.tie_weights()
    adopt_stored_buffers(model)
    islands = model._get_dtype_plan(dtype)
    replaced: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in replaced:
                    kept = island_dtype(f"{path}.{name}", islands)
                    with fake:
                        data = torch.empty(parameter.shape, dtype=kept or parameter.dtype, device="cpu")
                    replaced[id(parameter)] = nn.Parameter(data, requires_grad=False)
                module._parameters[name] = replaced[id(parameter)]
    return model


def adopt_stored_buffers(model: nn.Module) -> None:
    """Turns float buffers that are saved with the model, such as a router's correction, into parameters."""
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):
            stored = buffer is not None and name not in module._non_persistent_buffers_set
            if stored and buffer is not None and buffer.is_floating_point():
                del module._buffers[name]
                module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))


def island_dtype(name: str, islands: dict[str, torch.dtype]) -> torch.dtype | None:
    """Dtype in which Transformers keeps a parameter whatever the model's own is, by its table of name parts."""
    for part, dtype in islands.items():
        if re.search(rf"(^|\.){part}(\.|$)", name):
            return dtype
    return None


def causal_lm_class(config: PreTrainedConfig) -> type[nn.Module]:
    """The class Transformers would make for a config.

    Raises:
        UnsupportedModelError: it has no causal-LM class.
    """
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedModelError(
            f"Transformers has no causal language model for model_type {config.model_type!r}. "
            "The target must be a decoder-only language model."
        )
    found: type[nn.Module] = AutoModelForCausalLM._model_mapping[type(config)]
    return found


def _from_config(config: PreTrainedConfig, dtype: torch.dtype, attention: str) -> Any:
    causal_lm_class(config)
    try:
        return AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention, experts_implementation=EXPERTS_NAME
        )
    except (KeyError, ValueError) as error:
        if attention == "eager" or (attention not in str(error) and "attention" not in str(error)):
            raise
        # The class picks its attention from a table of its own.
        return _from_config(config, dtype, "eager")


def decoder_layers(model: nn.Module, num_layers: int) -> nn.ModuleList:
    """The list of decoder layers: the shallowest ModuleList with one entry per layer.

    Raises:
        UnsupportedModelError: there is none.
    """
    get_decoder = getattr(model, "get_decoder", None)
    decoder = get_decoder() if get_decoder is not None else None
    for root in (decoder, model):  # the decoder first: a vision tower has a list of its own
        lists = [
            (name.count("."), name, module)
            for name, module in (root.named_modules() if root is not None else ())
            if isinstance(module, nn.ModuleList) and len(module) == num_layers
        ]
        if lists:
            return min(lists, key=lambda item: item[:2])[2]
    raise UnsupportedModelError(f"{type(model).__name__} has no list of {num_layers} decoder layers")

"""A Hugging Face module whose parameters have shapes but no data, so its size costs nothing."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from accelerate import init_empty_weights
from dflash_runtime.errors import UnsupportedModelError
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, PreTrainedConfig

from dflash_export.trace_hooks import ATTENTION_NAME


def make_hollow_model(config: PreTrainedConfig, dtype: torch.dtype, fake: FakeTensorMode) -> nn.Module:
    """Builds the causal-LM class of a config with fake parameters and real buffers.

    Args:
        config: The target's configuration; it is copied.
        dtype: Dtype of the parameters.
        fake: The mode the parameters belong to.

    Raises:
        UnsupportedModelError: Transformers has no causal-LM class for the config.
    """
    config = type(config).from_dict(config.to_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with init_empty_weights(include_buffers=False):
            model = _from_config(config, dtype)
    model.eval()
    model.tie_weights()
    replaced: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in replaced:
                    with fake:
                        data = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                    replaced[id(parameter)] = nn.Parameter(data, requires_grad=False)
                module._parameters[name] = replaced[id(parameter)]
    return model


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


def _from_config(config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    causal_lm_class(config)
    try:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
    except ValueError as error:
        if "attention" not in str(error):
            raise
        raise UnsupportedModelError(
            f"model_type {config.model_type!r} has its own attention code, not Transformers' attention interface"
        ) from error


def decoder_layers(model: nn.Module, num_layers: int) -> nn.ModuleList:
    """The list of decoder layers: the shallowest ModuleList with one entry per layer.

    Raises:
        UnsupportedModelError: there is none.
    """
    lists = [
        (name.count("."), name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    if not lists:
        raise UnsupportedModelError(f"{type(model).__name__} has no list of {num_layers} decoder layers")
    return min(lists, key=lambda item: item[:2])[2]

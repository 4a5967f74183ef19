"""Products as ONNX Runtime's int8 kernels compute them, in PyTorch: what a product is given is rounded to int8.

Equal to ONNX Runtime 1.32 on x86; kernels of other processors may round whole rows in place of blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dflash_engines.passes.quantized_matmul import activation_block
from dflash_runtime.bundle import QuantizedWeight


def rounded_to_int8(given: Tensor, block: int) -> Tensor:
    """Activations [..., K] as 127 steps either way of the largest magnitude of each `block` of them."""
    grouped = given.reshape(*given.shape[:-1], -1, block)
    steps = grouped.abs().amax(-1, keepdim=True) / 127
    whole = torch.where(steps > 0, (grouped / steps).round(), 0)
    return (whole * steps).reshape(given.shape)


def activation_blocks(quantized: Mapping[str, QuantizedWeight], shapes: Mapping[str, list[int]]) -> dict[str, int]:
    """Weights whose products round their activations -> in blocks of so many.

    Args:
        quantized: A bundle's quantised weights.
        shapes: Their shapes [out, in].
    """
    found = {name: activation_block(facts.group_size, shapes[name][1]) for name, facts in quantized.items()}
    return {name: block for name, block in found.items() if block is not None}


def round_activations(module: nn.Module, blocks: Mapping[str, int]) -> None:
    """Makes a module round what its products with quantised weights are given.

    Args:
        module: Target or drafter.
        blocks: Name of a parameter -> block.
    """
    by_parameter = {id(p): blocks[n] for n, p in module.named_parameters(remove_duplicate=False) if n in blocks}

    def rounding(block: int) -> Any:
        return lambda module, args: (rounded_to_int8(args[0], block), *args[1:])

    for part in module.modules():
        block = by_parameter.get(id(part._parameters.get("weight")))
        if block is not None and not isinstance(part, nn.Embedding):
            part.register_forward_pre_hook(rounding(block))

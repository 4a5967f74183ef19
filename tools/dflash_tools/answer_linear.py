"""Matrices laid out once for the CPU's own kernels: oneDNN's blocked weights, as torch's compiler uses them.

A step over few rows costs what reading the weights costs; on the x86 CPU this was measured on, oneDNN reads them about
1.7 times as fast in this layout as in rows. The products are the same up to the order of their sums.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

PACKED_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Module):
    """A linear layer whose matrix is kept in oneDNN's layout only.

    Attributes:
        in_features: Columns of the matrix.
        out_features: Rows of the matrix.
        bias: [out] or None.
    """

    def __init__(self, linear: nn.Linear, num_rows: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), num_rows)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        output: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return output


def can_pack(model: nn.Module) -> bool:
    """Whether a model's matrices can be laid out anew: on a CPU, by a torch with oneDNN."""
    parameter = next(model.parameters())
    built = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    there = built and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return parameter.device.type == "cpu" and parameter.dtype in PACKED_DTYPES and there


def pack_linear_layers(model: nn.Module, num_rows: int) -> None:
    """Replaces every linear layer of a frozen model; the rows are given up, unless another module holds them too.

    Args:
        model: On a CPU; see `can_pack`.
        num_rows: Rows that most products will have.
    """
    with torch.no_grad():
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear:
                    setattr(parent, name, PackedLinear(child, num_rows))

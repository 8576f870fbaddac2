"""Linear layers with their weights packed for oneDNN, for half precision on CPUs.

`F.linear` brings a half-precision weight into the library's own layout at every call, which costs more than the product
itself when there are few rows. Packed once, the same product reads the weight where it lies, with equal results.
"""

from __future__ import annotations

import torch
from torch import nn

PACKED_DTYPES = (torch.bfloat16, torch.float16)


class PackedLinear(nn.Module):
    """Does what the `nn.Linear` it was made from does; `weight` is opaque."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` → `[..., out_features]`."""
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")
        return output


def pack(module: nn.Module) -> None:
    """Replace every plain half-precision linear layer of a model on the CPU; does nothing where that is no gain."""
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.dtype in PACKED_DTYPES and child.weight.device.type == "cpu":
                setattr(parent, name, PackedLinear(child))

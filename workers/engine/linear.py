"""Linear layers for half precision on CPUs, with their weights packed once at the start.

`F.linear` brings a half-precision weight into the library's own layout at every call, which costs more than the product
itself when there are few rows. There are two ways to do better, and which is faster depends on the CPU, so it is
measured: oneDNN's packed product, and for bfloat16 a compiled one that computes in float32.
"""

from __future__ import annotations

import logging
import time

import torch
from torch import nn

from workers.engine.kernels import linear as kernel

_log = logging.getLogger(__name__)
PACKED_DTYPES = (torch.bfloat16, torch.float16)
_TRIAL_ROWS = (16, 256)
_TRIALS = 5


class PackedLinear(nn.Module):
    """Does what the `nn.Linear` it was made from does, with equal results; `weight` is opaque."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` → `[..., out_features]`."""
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")
        return output


class WidenedLinear(nn.Module):
    """The same for bfloat16, computed in float32 and rounded once at the end."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.panels = kernel.pack(linear.weight.detach())
        self.weight = linear.weight.new_empty(0)  # for model code that asks for its type
        self.bias = None if linear.bias is None else linear.bias.detach().float()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` → `[..., out_features]`."""
        flat = rows.reshape(-1, self.in_features).float().contiguous()
        output = kernel.product(flat, self.panels)[:, : self.out_features]
        if self.bias is not None:
            output = output + self.bias
        return output.to(rows.dtype).reshape(*rows.shape[:-1], self.out_features)


def pack(module: nn.Module, compiled: bool | None) -> None:
    """Replace every plain half-precision linear layer of a model on the CPU. `compiled` says which way bfloat16 goes;
    None measures. Does nothing where neither is a gain."""
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    layers = [
        (parent, name)
        for parent in module.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child.weight.dtype in PACKED_DTYPES and child.weight.device.type == "cpu"
    ]
    wide = [getattr(parent, name) for parent, name in layers if _is_bfloat16(getattr(parent, name))]
    if wide and compiled is None:
        compiled = _compiled_is_faster(max(wide, key=lambda one: one.in_features))
        _log.info("linear layers: %s", "compiled" if compiled else "oneDNN")
    del wide
    for parent, name in layers:  # each original is freed before the next is packed
        layer = getattr(parent, name)
        setattr(parent, name, (WidenedLinear if compiled and _is_bfloat16(layer) else PackedLinear)(layer))


def _is_bfloat16(linear: nn.Linear) -> bool:
    return linear.weight.dtype == torch.bfloat16


def _compiled_is_faster(linear: nn.Linear) -> bool:
    """By what a row costs in a small batch and in a large one."""
    candidates = (PackedLinear(linear), WidenedLinear(linear))
    costs = [0.0, 0.0]
    for rows in _TRIAL_ROWS:
        batch = torch.randn(rows, linear.in_features).to(linear.weight.dtype)
        best = [float("inf"), float("inf")]
        for _ in range(_TRIALS):
            for index, candidate in enumerate(candidates):
                start = time.perf_counter()
                candidate(batch)
                best[index] = min(best[index], time.perf_counter() - start)
        costs = [cost + seconds / rows for cost, seconds in zip(costs, best, strict=True)]
    return costs[1] < costs[0]

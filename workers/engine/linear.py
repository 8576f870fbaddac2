"""Linear layers for half precision on CPUs: packed for oneDNN, computed together where they read the same input, and in
float32 for many rows where that is faster.

`F.linear` brings a half-precision weight into the library's own layout at every call, which costs more than the product
itself when there are few rows. Packed once, the same product reads the weight where it lies, with equal results. With
many rows multiplying is what costs, and CPUs without wide half-precision units multiply float32 faster, even when the
weight has to be widened for it.
"""

from __future__ import annotations

import time
from functools import cache

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

WIDEN_MIN_ROWS = 128
"""From this many rows on, widening a weight costs less than it saves where float32 is the faster type."""
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that transformers' models apply to one input, one after the other."""
_PROBE_SHAPE = (256, 1024, 1024)
_PROBE_REPEATS = 5


class _Product:
    """The product of one input with the weights of several layers. Calls come from one thread. `wide` is room for the
    weight in float32, None where that is no gain."""

    def __init__(self, linears: list[nn.Linear], wide: torch.Tensor | None) -> None:
        weights = [one.weight.detach() for one in linears]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        biases = [one.bias.detach() for one in linears if one.bias is not None]
        self._bias = torch.cat(biases) if biases else None
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._weight = None if wide is None else weight
        self._wide = wide
        self._sizes = [one.out_features for one in linears]
        self._input: torch.Tensor | None = None
        self._parts: tuple[torch.Tensor, ...] = ()

    def part(self, rows: torch.Tensor, index: int) -> torch.Tensor:
        """Layer `index`'s share of the product, which is computed once for calls with the same tensor."""
        if rows is not self._input:
            self._input, self._parts = rows, self._all(rows).split(self._sizes, dim=-1)
        part = self._parts[index]
        if index == len(self._sizes) - 1:
            self._input, self._parts = None, ()
        return part

    def _all(self, rows: torch.Tensor) -> torch.Tensor:
        if self._weight is not None and self._wide is not None and rows.numel() >= WIDEN_MIN_ROWS * rows.shape[-1]:
            weight = self._wide[: self._weight.numel()].view(self._weight.shape).copy_(self._weight)
            bias = None if self._bias is None else self._bias.float()
            return functional.linear(rows.float(), weight, bias).to(rows.dtype)
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
        return output


class PackedLinear(nn.Module):
    """Does what the `nn.Linear` that it stands for does; number `index` of those that are computed together."""

    def __init__(self, linear: nn.Linear, product: _Product, index: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._product, self._index = product, index

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` → `[..., out_features]`."""
        return self._product.part(rows, self._index)


def pack(model: PreTrainedModel) -> None:
    """Replace every plain half-precision linear layer of a model on the CPU; does nothing where that is no gain."""
    if not _packable(model.dtype):
        return
    head = model.get_output_embeddings()  # the largest by far, and sees one row a sequence: not worth room to widen it
    groups = [(parent, group) for parent in model.modules() for group in _groups(parent, model.dtype)]
    sizes = [sum(one.weight.numel() for one in group.values()) for _, group in groups if head not in group.values()]
    # One room for all: a new one at every call would be fetched from the system page by page.
    wide = torch.empty(max(sizes)) if sizes and float32_is_faster(model.dtype) else None
    for parent, group in groups:
        product = _Product(list(group.values()), None if head in group.values() else wide)
        for index, (name, linear) in enumerate(group.items()):
            setattr(parent, name, PackedLinear(linear, product, index))


def _packable(dtype: torch.dtype) -> bool:
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return torch.backends.mkldnn.is_available() and dtype in supported and bool(supported[dtype]())


@cache
def float32_is_faster(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies many rows faster in float32, widening the weight included, than in a half-precision
    type. Measured once per process: processor flags do not tell, since some CPUs run bfloat16 at half the float32
    rate."""
    if not _packable(dtype):
        return True
    count, depth, width = _PROBE_SHAPE
    rows = torch.zeros((count, depth), dtype=dtype)
    weight, wide = torch.zeros((width, depth), dtype=dtype), torch.empty((width, depth))
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    narrow_s = wide_s = float("inf")
    for _ in range(_PROBE_REPEATS):
        start = time.perf_counter()
        torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")
        middle = time.perf_counter()
        functional.linear(rows.float(), wide.copy_(weight)).to(dtype)
        narrow_s, wide_s = min(narrow_s, middle - start), min(wide_s, time.perf_counter() - middle)
    return wide_s < narrow_s


def _groups(parent: nn.Module, dtype: torch.dtype) -> list[dict[str, nn.Linear]]:
    """The layers of a type right below a module, those that can be computed together in one group."""
    found = {
        name: child
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child.weight.dtype == dtype and child.weight.device.type == "cpu"
    }
    groups = []
    for names in TOGETHER:
        kinds = {(found[name].in_features, found[name].bias is None) for name in names if name in found}
        if len(kinds) == 1 and all(name in found for name in names):
            groups.append({name: found.pop(name) for name in names})
    return [*groups, *({name: child} for name, child in found.items())]

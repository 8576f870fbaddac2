"""Packed linear layers against the plain ones."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from workers.engine.kernels import compiled
from workers.engine.kernels import linear as kernel
from workers.engine.linear import PackedLinear, WidenedLinear, pack

needs_bf16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 on this CPU"
)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 12, 13, 96, 97, 211])
@pytest.mark.parametrize(("outputs", "depth"), [(32, 16), (1000, 64), (7, 5), (576, 1536)])
def test_the_compiled_product_equals_torchs(threads: None, rows: int, outputs: int, depth: int) -> None:
    torch.manual_seed(rows)
    weight, x = torch.randn(outputs, depth).bfloat16(), torch.randn(rows, depth)
    found = kernel.product(x, kernel.pack(weight))
    expected = x.double() @ weight.double().t()
    assert found.shape == (rows, -(-outputs // kernel.PANEL) * kernel.PANEL)
    assert torch.allclose(found[:, :outputs].double(), expected, atol=1e-5 * depth**0.5, rtol=1e-5)
    assert not found[:, outputs:].any()


@needs_bf16
@pytest.mark.parametrize("kind", [PackedLinear, WidenedLinear])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_is_replaced_by_one_that_does_the_same(kind: type[nn.Module], bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(64, 100, bias=bias).bfloat16()
    x = torch.randn(2, 5, 64).bfloat16()
    found = kind(plain)(x)
    assert found.dtype == torch.bfloat16
    expected = x.double() @ plain.weight.double().t() + (plain.bias.double() if bias else 0)
    assert found.shape == expected.shape
    assert torch.allclose(found.double(), expected, atol=2e-2, rtol=1e-2)


@needs_bf16
@pytest.mark.parametrize(("compiled", "kind"), [(True, WidenedLinear), (False, PackedLinear)])
def test_which_way_is_taken_can_be_told(compiled: bool, kind: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(64, 64).bfloat16(), nn.Linear(64, 64), nn.Linear(64, 64).half())
    pack(model, compiled)
    assert [type(layer) for layer in model] == [kind, nn.Linear, PackedLinear]


@needs_bf16
@pytest.mark.parametrize("kind", [PackedLinear, WidenedLinear])
def test_without_being_told_the_faster_way_is_measured(monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module]) -> None:
    forward = kind.forward
    other = PackedLinear if kind is WidenedLinear else WidenedLinear
    slow = other.forward
    monkeypatch.setattr(other, "forward", lambda self, rows: (time.sleep(0.01), slow(self, rows))[1])
    assert kind.forward is forward
    model = nn.Sequential(nn.Linear(256, 256).bfloat16(), nn.Linear(128, 256).bfloat16())
    pack(model, None)
    assert {type(layer) for layer in model} == {kind}


def test_fewer_threads_than_asked_for_leave_nothing_out() -> None:
    """As batch systems arrange it; OpenMP reads the limit when it is loaded."""
    code = """
import torch
from workers.engine.kernels import linear as kernel
torch.set_num_threads(4)
weight, x = torch.randn(512, 64).bfloat16(), torch.randn(9, 64)
assert torch.allclose(kernel.product(x, kernel.pack(weight)), x @ weight.float().t(), atol=1e-3)
"""
    for limits in ({"OMP_THREAD_LIMIT": "1"}, {"OMP_DYNAMIC": "true"}, {}):
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **limits}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("place", ["file", "nowhere"])
def test_without_a_place_for_a_cache_kernels_are_compiled_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").write_text("")
    if place == "file":
        monkeypatch.setenv("HEADWATER_CACHE", str(tmp_path / "file"))
    else:
        monkeypatch.setattr(compiled, "cache_dir", Path("~nobody-of-this-name").expanduser)
    kernel = compiled.compiled("test", lambda x: x + 1)
    assert kernel(2) == 3
    assert sum(kernel.stats.cache_hits.values()) == 0
    assert kernel.stats.cache_path is None

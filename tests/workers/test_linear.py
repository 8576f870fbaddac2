"""Packed linear layers compute what the layers they stand for compute, alone and together."""

from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from tests import model_zoo
from workers.engine import linear
from workers.engine.linear import WIDEN_MIN_ROWS, PackedLinear, pack

pytestmark = pytest.mark.skipif(
    not linear._packable(torch.bfloat16), reason="this CPU has no bfloat16 products, so layers are not packed"
)


@pytest.fixture(params=[True, False], ids=["widened", "narrow"])
def _widened(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "float32_is_faster", lambda _: request.param)


def model(**changes: Any) -> tf.PreTrainedModel:
    torch.manual_seed(0)
    made = tf.AutoModelForCausalLM.from_config(tf.Qwen2Config(**model_zoo.COMMON | changes))  # has biases in q, k and v
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return made.to(torch.bfloat16).eval()


@pytest.mark.usefixtures("_widened")
@pytest.mark.parametrize("rows", [1, WIDEN_MIN_ROWS - 1, WIDEN_MIN_ROWS, 300])
@torch.inference_mode()
def test_each_layer_gives_what_it_gave(rows: int) -> None:
    plain, packed = model(), model()
    pack(packed)
    layers = [(name, module) for name, module in plain.named_modules() if type(module) is nn.Linear]
    assert len(layers) == 7 * 3 + 1
    for name, layer in layers:
        other = packed.get_submodule(name)
        assert isinstance(other, PackedLinear)
        x = torch.randn((1, rows, layer.in_features), dtype=torch.bfloat16)
        expected = layer(x)
        assert other(x).shape == expected.shape
        # Sums in another order, rounded to eight bits: one unit in the last place of the largest.
        torch.testing.assert_close(other(x), expected, rtol=2**-7, atol=2**-8)


@torch.inference_mode()
def test_layers_of_one_input_are_computed_once_and_others_apart() -> None:
    packed = model()
    pack(packed)
    attention = packed.model.layers[0].self_attn
    one, other = (torch.randn((1, 5, attention.q_proj.in_features), dtype=torch.bfloat16) for _ in range(2))
    q, k, v = attention.q_proj(one), attention.k_proj(one), attention.v_proj(one)
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    assert attention.q_proj(one).untyped_storage().data_ptr() != q.untyped_storage().data_ptr()
    # In any order, with any inputs, each layer answers for the input that it got.
    plain = model().model.layers[0].self_attn
    for name, x in [("k_proj", other), ("q_proj", one), ("v_proj", other), ("v_proj", one), ("q_proj", other)]:
        torch.testing.assert_close(getattr(attention, name)(x), getattr(plain, name)(x), rtol=2**-7, atol=2**-8)


@torch.inference_mode()
def test_what_is_not_a_plain_half_precision_layer_stays() -> None:
    class Special(nn.Linear):
        """A layer with a forward of its own may not be replaced."""

    changed = model()
    inner = changed.model.layers[0].self_attn
    inner.q_proj = Special(64, 64, dtype=torch.bfloat16)
    whole = model().float()
    pack(changed)
    pack(whole)
    assert type(inner.q_proj) is Special
    assert isinstance(inner.k_proj, PackedLinear)
    assert not any(isinstance(module, PackedLinear) for module in whole.modules())


def test_the_head_is_never_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "float32_is_faster", lambda _: True)
    packed = model()
    pack(packed)
    assert packed.lm_head._product._weight is None
    assert packed.model.layers[0].mlp.up_proj._product._weight is not None

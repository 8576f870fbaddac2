"""Keys name whole prefixes, are equal everywhere, and never mix models, adapters or tenants."""

import itertools
import os
import subprocess
import sys

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from transfer.messages import pack_tokens
from transfer.prefix import KEY_BYTES, PrefixChain, root_key

ROOT = root_key("model")
BLOCK = 4
tokens = st.lists(st.integers(0, 3), max_size=20)


def chain(prompt: list[int], root: bytes = ROOT) -> PrefixChain:
    return PrefixChain.of(root, pack_tokens(prompt), BLOCK)


@given(tokens, tokens)
def test_keys_are_equal_exactly_where_prefixes_are(one: list[int], other: list[int]) -> None:
    for index, (a, b) in enumerate(zip(chain(one).keys, chain(other).keys, strict=False)):
        end = (index + 1) * BLOCK
        assert (a == b) == (one[:end] == other[:end])


@given(tokens)
def test_there_is_a_key_for_every_whole_block(prompt: list[int]) -> None:
    keys = chain(prompt).keys
    assert len(keys) == len(prompt) // BLOCK
    assert all(len(key) == KEY_BYTES for key in keys)
    assert keys == chain(prompt + [9] * (-len(prompt) % BLOCK - 1)).keys[: len(keys)]
    assert len(set(keys)) == len(keys)


def test_every_bit_of_a_token_counts() -> None:
    variants = [[0, 0, 0, 0], *([0, 1 << bit, 0, 0] for bit in range(31))]
    assert len({chain(prompt).keys for prompt in variants}) == len(variants)


def test_roots_never_collide() -> None:
    names = ["", "a", "b", "ab", "model", "adapter", "tenant", "a\x00", "\x01\x00\x00\x00a"]
    roots = [root_key(model, adapter, tenant.encode()) for model, adapter, tenant in itertools.product(names, repeat=3)]
    assert len(set(roots)) == len(roots)


def test_a_tenant_is_not_an_adapter_of_the_same_name() -> None:
    prompt = [1] * 8
    one = chain(prompt, root_key("model", adapter="x")).keys
    other = chain(prompt, root_key("model", tenant=b"x")).keys
    assert not {*one, *chain(prompt).keys} & set(other)


SCRIPT = """
from transfer.messages import pack_tokens
from transfer.prefix import PrefixChain, root_key
chain = PrefixChain.of(root_key("model", "adapter", b"tenant"), pack_tokens(range(100)), 16)
print(b"".join([chain.root, *chain.keys]).hex())
"""


def test_processes_with_different_hash_seeds_make_equal_keys() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    here = PrefixChain.of(root_key("model", "adapter", b"tenant"), pack_tokens(range(100)), 16)
    assert outputs == {b"".join([here.root, *here.keys]).hex() + "\n"}


def test_keys_never_change() -> None:
    """Workers of two versions, and blocks on disk, depend on it."""
    assert ROOT.hex() == "5bb5f168dc2fc406"
    assert chain([1, 2, 3, 4]).keys[0].hex() == "c8ba3bb80c4329be"


def test_keys_as_numbers() -> None:
    one = chain(list(range(12)))
    assert one.numbers(np.array([1, 3])).tolist() == [int.from_bytes(one.keys[i], "little") for i in (0, 2)]
    assert chain([1]).numbers(np.array([], np.int32)).tolist() == []


@given(tokens, tokens)
def test_a_chain_goes_on_where_it_ended(one: list[int], more: list[int]) -> None:
    assert chain(one).extended(pack_tokens(one + more)) == chain(one + more)


def test_the_anchor() -> None:
    one = chain(list(range(12)))
    assert [one.anchor(depth) for depth in (1, 2, 3, 4)] == [*one.keys, one.keys[-1]]
    assert chain([1]).anchor(3) == ROOT

"""Configuration from file, environment and flags."""

import re
from pathlib import Path

import pytest

from cluster.config import ConfigError, load


def test_flags_beat_the_environment_beats_the_file(tmp_path: Path) -> None:
    file = tmp_path / "headwater.yaml"
    file.write_text("worker: {block_size: 8, step_tokens: 100, kv_memory: 2GiB}\ngateway: {port: 1}\n")
    environ = {"HEADWATER__WORKER__BLOCK_SIZE": "32", "HEADWATER__GATEWAY__PORT": "2", "OTHER": "x"}
    found = load(file, {"gateway.port": 3, "worker.dtype": None}, environ)
    assert (found.worker.block_size, found.worker.step_tokens, found.gateway.port) == (32, 100, 3)
    assert found.worker.kv_memory == 2 * 2**30


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"worker.blok_size": 3}, "worker.blok_size: unknown setting; did you mean worker.block_size?"),
        ({"wrker.block_size": 3}, "did you mean worker"),
        ({"worker.block_size": 0}, "worker.block_size"),
        ({"worker.step_tokens": 15}, "worker.step_tokens: is smaller than a block of 16 tokens"),
        ({"worker.block_size": 1024}, "worker.step_tokens: is smaller than a block of 1024 tokens"),
        ({"worker.eviction": "mru"}, "worker.eviction: Input should be 'lru', 'lru-k'"),
        ({"worker.kv_memory": "1 apple"}, "'1 apple'"),
        ({"prefill.replicas": 0, "decode.replicas": 0}, "nobody would answer"),
        ({"prefill.replicas": 2, "decode.replicas": 0}, "decode.replicas is 0"),
        ({"transfer.lease_s": 0.001}, "transfer.lease_s: must be more than twice transfer.poll_interval_s (0.005)"),
        ({"transfer.backend": "PIGEON"}, "transfer.backend: Input should be 'UCX', got 'PIGEON'"),
        ({"transfer.ports": "20000"}, "transfer.ports: is not a range of ports"),
        ({"transfer.ports": "20100-20000"}, "transfer.ports: is not a range of ports"),
        ({"transfer.ports": "0-99"}, "transfer.ports: is not a range of ports"),
        ({"transfer.ports": "65000-65536"}, "transfer.ports: is not a range of ports"),
        ({"transfer.ucx": {"T-LS": "tcp"}}, "transfer.ucx: 'T-LS' is not the name of a UCX variable"),
        ({"transfer.ucx": {"UCX_TLS": "tcp"}}, "transfer.ucx: 'UCX_TLS' is not the name of a UCX variable"),
        ({"transfer.ucx": {"TLS": ["tcp"]}}, "transfer.ucx.TLS: Input should be a valid string"),
        (
            {"transfer.interface": "lo", "transfer.ucx": {"NET_DEVICES": "eth0"}},
            "transfer.ucx: NET_DEVICES is already what transfer.interface sets",
        ),
        ({"gateway.port": 1, "gateway.port.x": 1}, "gateway.port"),
        ({"gateway.port": 65535, "gateway.replicas": 2}, "gateway.port 65535 leaves no ports for 2 gateways"),
        ({"gateway.replicas": 65}, "gateway.replicas: Input should be less than or equal to 64, got 65"),
        ({"tiers.format": "int8"}, "tiers: format is int8 and host is 0"),
        ({"prefill.resources": {"GPU": 0}}, "prefill.resources.GPU: Input should be greater than 0, got 0"),
        ({"gossip.host": "0.0.0.0"}, "gossip.host"),
        ({"telemetry.metrics_host": "0.0.0.0"}, "telemetry.metrics_host"),
        ({"gossip.silent_s": 0.1}, "gossip.silent_s: must be more than twice"),
    ],
)
def test_mistakes_are_named(flags: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        load(None, flags, {})


@pytest.mark.parametrize("key", ["a secret word", 1234567890123456789])
def test_a_secret_that_cannot_be_is_not_shown(key: object) -> None:
    with pytest.raises(ConfigError, match=r"^gossip\.key: ") as error:
        load(None, {"gossip.key": key}, {})
    assert str(key) not in str(error.value)
    assert "0123456789abcdef" not in repr(load(None, {"gossip.key": "0123456789abcdef"}, {}))


def test_variables_of_ucx_from_the_environment() -> None:
    environ = {"HEADWATER__TRANSFER__UCX__TLS": "tcp,sm", "HEADWATER__TRANSFER__UCX__MAX_RMA_RAILS": "1"}
    assert load(None, {}, environ).transfer.ucx == {"TLS": "tcp,sm", "MAX_RMA_RAILS": "1"}


def test_a_file_that_is_no_mapping(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    for text in ("[1, 2]", "a: [", "just text", "worker: {}\nworker: {}"):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"bad\.yaml"):
            load(file, {}, {})


def test_the_default_is_one_pair() -> None:
    assert load(None, {}, {}).workers == [("prefill-0", "prefill"), ("decode-0", "decode")]


@pytest.mark.parametrize(
    "flags",
    [
        {"gateway.api_keys": ["a secret word of some length"], "gateway.tls_key": "key.pem"},
        {"gateway.api_keys": ["a secret word of some length"], "gateway.port": 65535, "gateway.replicas": 2},
        {"gateway.api_keys": [1234567890123456789]},
        {"gossip.key": ["a secret word of some length"]},
    ],
)
def test_a_section_with_secrets_is_not_shown(flags: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as error:
        load(None, flags, {})
    assert "secret" not in str(error.value)
    assert "123456789" not in str(error.value)


def test_text_that_cannot_be_read_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^HEADWATER__GOSSIP__KEY: its value is not valid YAML$"):
        load(None, {}, {"HEADWATER__GOSSIP__KEY": "@secret"})
    file = tmp_path / "headwater.yaml"
    file.write_text("gossip:\n  key: @secret\n")
    with pytest.raises(ConfigError, match="line 2") as error:
        load(file, {}, {})
    assert "secret" not in str(error.value)

"""HTTPS, with a certificate that is made for the test."""

import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from router.config import GatewayConfig
from router.gateway.text import Text
from tests.router.serving import Played, application, completion, serving
from tests.router.test_http import three


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    about = ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(chain), *about]
    subprocess.run(made, check=True, capture_output=True)
    return chain, key


async def test_answers_and_streams_are_encrypted(text: Text, certificate: tuple[Path, Path]) -> None:
    chain, key = certificate
    config = GatewayConfig(tls_certificate=chain, tls_key=key)
    async with serving(application(text, Played(three), config), config) as (port, _):
        trusting = ssl.create_default_context(cafile=str(chain))
        async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=trusting) as client:
            answer = await client.post("/v1/completions", content=completion(max_tokens=3))
            assert answer.json()["usage"]["completion_tokens"] == 3
            async with client.stream(
                "POST", "/v1/completions", content=completion(max_tokens=3, stream=True)
            ) as stream:
                lines = [line async for line in stream.aiter_lines() if line]
            assert lines[-1] == "data: [DONE]"
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.HTTPError):
                await client.post(f"http://127.0.0.1:{port}/v1/completions", content=completion(max_tokens=3))


def test_what_cannot_work_is_said_at_the_start(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    chain, key = certificate
    with pytest.raises(ValueError, match="tls_certificate and tls_key belong together"):
        GatewayConfig(tls_certificate=chain)
    other = tmp_path / "other.pem"
    for wrong in (other, chain):
        with pytest.raises(ValueError, match=f"cannot use {chain} with {wrong}"):
            GatewayConfig(tls_certificate=chain, tls_key=wrong)
    assert GatewayConfig(tls_certificate=chain, tls_key=key).tls_key == key

"""The dashboard on real clusters: workers show their trees while they serve, and gateways tell each other."""

import time
from typing import Any

import httpx

from cluster.control import Control
from cluster.launch import Cluster

STEM = "A headwater is the place where a river begins, high in the hills, far from the sea. " * 6


def test_what_a_request_leaves_behind(pair: Cluster) -> None:
    """Its plan and its timeline with the transfer, and its prompt in the trees of both workers."""
    with httpx.Client(base_url=pair.url, timeout=60) as http:
        body = {"model": pair.model_name, "prompt": f"{STEM}And it ends?", "max_tokens": 4, "ignore_eos": True}
        answer = http.post("/v1/completions", json=body, headers={"x-request-id": "looked-at"}).json()
        prompt = answer["usage"]["prompt_tokens"]
        requests = http.get("/dashboard/api/requests").json()["requests"]
        mine = next(one for one in requests if one["name"] == "looked-at")
        one = http.get(f"/dashboard/api/requests/{mine['gateway']}/{mine['number']}").json()
        kinds = [event["what"] for event in one["events"]]
        assert sorted(kinds) == ["first token", "planned", "sent", "transferred"]
        assert (one["ended"], one["prompt_tokens"], one["output_tokens"]) == ("length", prompt, 4)
        assert one["label"].endswith("And it ends?")
        picture = http.get("/dashboard/api/cluster").json()
        assert {one["name"]: one["state"] for one in picture["workers"]} == {"prefill-0": "ready", "decode-0": "ready"}
        assert picture["seconds"][-1]["handed"] or picture["seconds"][-2]["handed"] == {"prefill-0>decode-0": 1}
        for worker in ("prefill-0", "decode-0"):
            tree = http.get(f"/dashboard/api/trees/{worker}").json()
            assert tree["whole"]
            (run,) = (run for run in tree["runs"] if (run["text"] or "").startswith("A headwater is the place"))
            assert run["device"] == run["tokens"] >= 16
            parent = tree["runs"][run["parent"]]
            path = f"{parent['key']}.{run['key']}"
            closer = http.get(f"/dashboard/api/trees/{worker}", params={"path": path}).json()
            assert closer["path"] == [parent["key"], run["key"]]
            assert closer["runs"][0]["below"] == run["below"]


def test_gateways_tell_each_other(control: Control) -> None:
    """Whichever one is asked, it knows the requests of both."""
    urls = control.call("report").urls
    for url in urls:
        body = {"model": _model(url), "prompt": [5] * 40, "max_tokens": 2, "ignore_eos": True}
        named = {"x-request-id": f"by {url}"}
        assert httpx.post(f"{url}/v1/completions", json=body, headers=named, timeout=60).status_code == 200
    for url in urls:
        picture = _picture(url, len(urls))
        assert sum(one["answers"] for one in picture["gateways"]) == len(urls)
        requests = httpx.get(f"{url}/dashboard/api/requests").json()["requests"]
        found = {one["name"]: one for one in requests}
        for other in urls:
            mine = found[f"by {other}"]
            one = httpx.get(f"{url}/dashboard/api/requests/{mine['gateway']}/{mine['number']}").json()
            assert (one["name"], one["ended"]) == (f"by {other}", "length")


def _model(url: str) -> str:
    return str(httpx.get(f"{url}/v1/models").json()["data"][0]["id"])


def _picture(url: str, gateways: int) -> dict[str, Any]:
    """Once all gateways know each other by gossip."""
    until = time.monotonic() + 10
    while True:
        picture: dict[str, Any] = httpx.get(f"{url}/dashboard/api/cluster", timeout=10).json()
        if len(picture["gateways"]) >= gateways or time.monotonic() > until:
            return picture
        time.sleep(0.1)

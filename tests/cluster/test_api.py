"""The OpenAI surface on a real cluster: the official client works, and bad input gets an error that helps."""

import json

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types import CompletionUsage
from transformers import AutoTokenizer

from cluster.launch import Cluster
from tests.cluster.checks import assert_alive, assert_balance
from tests.cluster.conftest import PAIR_CONTEXT

MODEL = "smollm2-135m-instruct"
CONTEXT = PAIR_CONTEXT
VOCABULARY = 49152
CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(pair: Cluster) -> OpenAI:
    return OpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def http(pair: Cluster) -> httpx.Client:
    return httpx.Client(base_url=pair.url, timeout=120)


@pytest.fixture(scope="module")
def tokenizer(smollm):  # type: ignore[no-untyped-def]
    return AutoTokenizer.from_pretrained(smollm)


@pytest.fixture(autouse=True)
def at_rest(pair: Cluster):  # type: ignore[no-untyped-def]
    yield
    assert_balance(pair)


def complete(http: httpx.Client, **body: object) -> httpx.Response:
    content = json.dumps({"model": MODEL, "prompt": "One two three", **body})
    return http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})


def error_of(answer: httpx.Response, status: int = 400) -> dict:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_chat_with_the_official_client(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, temperature=0, max_tokens=16)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream_and_whole_answer_agree(client: OpenAI) -> None:
    wanted = {"model": MODEL, "messages": CHAT, "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(**wanted)
    chunks = list(client.chat.completions.create(**wanted, stream=True, stream_options={"include_usage": True}))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    reasons = [choice.finish_reason for choice in choices]
    assert reasons == [None] * (len(reasons) - 1) + [whole.choices[0].finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_stream_ends_with_done_and_has_no_usage_unless_asked(http: httpx.Client) -> None:
    body = complete(http, stream=True, max_tokens=3).text
    events = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    assert all("usage" not in json.loads(event) for event in events[:-1])


def test_cached_tokens_are_reported(client: OpenAI) -> None:
    prompt = [900 + step for step in range(70)]
    seen = [
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=1).usage.prompt_tokens_details.cached_tokens
        for _ in range(2)
    ]
    assert seen == [0, 69]


def test_chat_ids_are_the_templates_own(http: httpx.Client, client: OpenAI, tokenizer) -> None:  # type: ignore[no-untyped-def]
    """No special token is doubled on the way through text."""
    expected = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    chat = client.chat.completions.create(model=MODEL, messages=CHAT, temperature=0, max_tokens=5)
    ids = client.completions.create(model=MODEL, prompt=expected, temperature=0, max_tokens=5)
    assert chat.usage.prompt_tokens == len(expected)
    assert chat.choices[0].message.content == ids.choices[0].text


@pytest.mark.parametrize("text", ["naïve café", "数学は楽しい", "👩‍👩‍👧‍👦 and 🏳️‍🌈", "a\u0301e\u0301"])
def test_streamed_text_is_whole_characters(client: OpenAI, tokenizer, text: str) -> None:  # type: ignore[no-untyped-def]
    """The joined stream equals the full decode of its ids, and no replacement character appears before the end."""
    prompt = f"Repeat after me: {text} {text} {text}"
    extra = {"return_token_ids": True, "ignore_eos": True}
    chunks = list(
        client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=24, temperature=0, stream=True, extra_body=extra
        )
    )
    ids = [token for chunk in chunks for choice in chunk.choices for token in choice.model_extra["token_ids"]]
    pieces = [choice.text for chunk in chunks for choice in chunk.choices]
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
    assert not any("\ufffd" in piece for piece in pieces[:-1])


def test_priority_and_cache_ttl_are_the_operators_to_allow(http: httpx.Client, pair: Cluster) -> None:
    assert complete(http, priority=-100, cache_ttl=0, user="somebody", max_tokens=2).status_code == 200
    for field, value, setting in (("priority", 1, "max_priority"), ("cache_ttl", 0.5, "max_cache_ttl_s")):
        error = error_of(complete(http, **{field: value}))
        assert (error["param"], error["type"]) == (field, "invalid_request_error")
        assert f"{field}: at most 0 is allowed here (gateway.{setting}), got {value}" in error["message"]
    for field, value in (("priority", 101), ("priority", 0.5), ("cache_ttl", -1), ("cache_ttl", 1e9), ("user", 3)):
        assert error_of(complete(http, **{field: value}))["param"] == field


def test_one_token_means_one_token(client: OpenAI) -> None:
    for stream_prompt in ("The sky is", [1000] * 40):
        answer = client.completions.create(model=MODEL, prompt=stream_prompt, max_tokens=1, temperature=0)
        assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (1, "length")


def test_an_end_of_sequence_as_first_token_leaves_nothing_behind(client: OpenAI, pair: Cluster, tokenizer) -> None:  # type: ignore[no-untyped-def]
    """The prefill worker sees the end itself; the decode worker's blocks must come back."""
    filler = [{"role": "system", "content": "Be brief. " * 180}]
    ids = tokenizer.apply_chat_template([*filler, *CHAT], add_generation_prompt=True, return_dict=False)
    assert len(ids) > pair.config.worker.step_tokens  # so that the decode worker reserves before the end is known
    answer = client.completions.create(
        model=MODEL, prompt=ids, max_tokens=20, temperature=0, extra_body={"return_token_ids": True}
    )
    whole = [*ids, *answer.choices[0].model_extra["token_ids"][:-1]]
    ended = client.completions.create(model=MODEL, prompt=whole, max_tokens=20, temperature=0)
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == ("", "stop")
    assert ended.usage.completion_tokens == 1
    assert_balance(pair)


def test_stop_strings(client: OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="One two three four", max_tokens=20, temperature=0)
    text = whole.choices[0].text
    stop = text[7:12]
    chunks = list(
        client.completions.create(
            model=MODEL, prompt="One two three four", max_tokens=20, temperature=0, stop=[stop], stream=True
        )
    )
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == text[: text.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


FIRST_WORDS = "One two three four " * 20  # longer than a block, so that there is KV to hand over


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("skipped", "length"), [(0, 1), (1, 2), (0, 12)])
def test_a_stop_string_in_the_first_tokens_leaves_nothing_behind(
    client: OpenAI, pair: Cluster, tokenizer, skipped: int, length: int, stream: bool
) -> None:  # type: ignore[no-untyped-def]
    """The gateway finds it while prefill worker and decode worker are still handing over."""
    wanted = {"model": MODEL, "prompt": FIRST_WORDS, "max_tokens": 200, "temperature": 0}
    extra = {"ignore_eos": True, "return_token_ids": True}
    whole = client.completions.create(**wanted | {"max_tokens": 12}, extra_body=extra).choices[0]
    stop = whole.text[skipped : skipped + length]
    kept = whole.text[: whole.text.index(stop)]
    ids = whole.model_extra["token_ids"]
    used = next(n for n in range(1, len(ids) + 1) if stop in tokenizer.decode(ids[:n]))
    text, reason, usage = finish(client, stream, **wanted, stop=[stop], extra_body=extra)
    assert (text, reason) == (kept, "stop")
    assert len(text) <= skipped
    assert usage.completion_tokens == used
    assert usage.total_tokens == usage.prompt_tokens + used == len(tokenizer(FIRST_WORDS)["input_ids"]) + used
    assert_balance(pair, within_s=2)


def finish(client: OpenAI, stream: bool, **wanted: object) -> tuple[str, str, CompletionUsage]:
    """Text, finish reason and usage of a completion."""
    if not stream:
        answer = client.completions.create(**wanted)
        return answer.choices[0].text, answer.choices[0].finish_reason, answer.usage
    chunks = list(client.completions.create(**wanted, stream=True, stream_options={"include_usage": True}))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    (reason,) = (choice.finish_reason for choice in choices if choice.finish_reason)
    return "".join(choice.text for choice in choices), reason, chunks[-1].usage


def test_several_prompts_keep_their_order(client: OpenAI) -> None:
    prompts = ["One two three", "The sky is", "Bees make"]
    each = [client.completions.create(model=MODEL, prompt=one, max_tokens=6, temperature=0) for one in prompts]
    together = client.completions.create(model=MODEL, prompt=prompts, max_tokens=6, temperature=0)
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert [choice.text for choice in together.choices] == [one.choices[0].text for one in each]
    assert together.usage.completion_tokens == sum(one.usage.completion_tokens for one in each)


def test_greedy_and_nearly_greedy(client: OpenAI) -> None:
    texts = {
        client.completions.create(model=MODEL, prompt="The sky is", max_tokens=6, temperature=heat).choices[0].text
        for heat in (0, 1e-5)
    }
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": 5}, "prompt", "5"),
        ({"prompt": [1, VOCABULARY]}, "prompt", f"{VOCABULARY}"),
        ({"prompt": [-1]}, "prompt", "-1"),
        ({"prompt": [1] * (CONTEXT + 1)}, "prompt", f"{CONTEXT + 1}"),
        ({"prompt": [1] * CONTEXT}, "prompt", f"{CONTEXT}"),
        ({"prompt": [1] * (CONTEXT - 1), "max_tokens": 2}, "max_tokens", f"{CONTEXT - 1} prompt tokens + 2"),
        ({"max_tokens": 0}, "max_tokens", "0"),
        ({"max_tokens": -1}, "max_tokens", "-1"),
        ({"max_tokens": "5"}, "max_tokens", '"5"'),
        ({"max_tokens": 10**12}, "max_tokens", f"{10**12}"),
        ({"temperature": -1}, "temperature", "-1"),
        ({"temperature": 2.5}, "temperature", "2.5"),
        ({"temperature": float("nan")}, "temperature", "NaN"),
        ({"top_p": float("inf")}, "top_p", "Infinity"),
        ({"stop": "x" * 2000}, "stop", "2000 characters"),
        ({"prompt": "x " * 5_000_000}, "prompt", "10000000 characters"),
        ({"prompt": [1.5] * 1_000_000}, "prompt.0", "1.5"),
        ({"top_p": 0}, "top_p", "0"),
        ({"top_p": 2}, "top_p", "2"),
        ({"stop": [""]}, "stop", "empty"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "5 strings"),
        ({"n": 0}, "n", "0"),
        ({"n": 129}, "n", "129"),
        ({"n": 10**9}, "n", "1000000000"),
        ({"prompt": ["x"] * 100, "n": 100}, "n", "100 prompts x 100 choices"),
        ({"best_of": 2, "n": 3}, "best_of", "less than n: 3"),
        ({"best_of": 2, "stream": True}, "best_of", "stream"),
        ({"logprobs": 21}, "logprobs", "21"),
        ({"min_tokens": 17}, "min_tokens", "17 is more than the 16"),
        ({"min_p": 1.5}, "min_p", "1.5"),
        ({"frequency_penalty": 2.5}, "frequency_penalty", "2.5"),
        ({"repetition_penalty": 0}, "repetition_penalty", "0"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "'x'"),
        ({"logit_bias": {str(VOCABULARY): 1}}, "logit_bias", f"{VOCABULARY}"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "101"),
        ({"timeout": 10**6}, "timeout", "gateway.request_timeout_s"),
        ({"cache_salt": ""}, "cache_salt", '""'),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"guided_regex": "("}, "guided_regex", "regex"),
        ({"guided_json": "{"}, "guided_json", "JSON schema"),
        ({"guided_json": {"type": "foo"}}, "guided_json", "foo"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "not together with guided_regex"),
        ({"guided_choice": []}, "guided_choice", "1"),
        ({"suffix": "x"}, "suffix", "x"),
        ({"stream_options": {"usage": True}}, "stream_options.usage", "not supported"),
    ],
)
def test_bad_values_are_named(http: httpx.Client, body: dict, param: str, words: str) -> None:
    error = error_of(complete(http, **body))
    assert error["param"] == param
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "internal", ["request_id", "salt", "gateway", "decode", "plan", "cached_tokens", "kv_transfer_params"]
)
def test_internal_fields_are_refused(http: httpx.Client, internal: str) -> None:
    error = error_of(complete(http, **{internal: "x"}))
    assert error["param"] == internal


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"model": "m", "prompt": "\\ud800"}',
        b'{"model": "m", "prompt": [NaN]}',
        b"[" * 100_000,
        b'{"model": "m", "max_tokens": ' + b"9" * 5000 + b"}",
    ],
)
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_bodies_that_are_no_request(http: httpx.Client, route: str, body: bytes) -> None:
    error = error_of(http.post(route, content=body, headers={"Content-Type": "application/json"}))
    assert error["type"] == "invalid_request_error"


def test_a_body_over_the_limit_is_refused(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", content=b'{"prompt": "' + b"x" * (17 << 20) + b'"}')
    assert "the body is larger than" in error_of(answer, 413)["message"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        ([{"role": "user"}, 5], "messages.1"),
        ([{"content": "x"}], "messages.0.role"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "messages.0.content.0"),
    ],
)
def test_bad_messages(http: httpx.Client, messages: object, param: str) -> None:
    error = error_of(http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages}))
    assert error["param"].startswith(param)


def test_an_empty_assistant_message_is_accepted(client: OpenAI) -> None:
    messages = [*CHAT, {"role": "assistant", "content": ""}, *CHAT]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=2)
    assert answer.usage.completion_tokens >= 1


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_unknown_models_are_named(http: httpx.Client, route: str) -> None:
    error = error_of(http.post(route, json={"model": "gpt-9", "prompt": "x", "messages": CHAT}), 400)
    body = {"model": "gpt-9", **({"messages": CHAT} if "chat" in route else {"prompt": "x"})}
    error = error_of(http.post(route, json=body), 404)
    assert "gpt-9" in error["message"]
    assert error_of(http.get("/v1/models/gpt-9"), 404)["code"] == "model_not_found"


def test_the_client_sees_typed_errors(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=MODEL, prompt="x", temperature=9)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="none", prompt="x")


def test_prompts_up_to_the_context_work(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=[1] * (CONTEXT - 1), max_tokens=1, temperature=0)
    assert answer.usage.total_tokens == CONTEXT


def test_models_health_and_readiness(http: httpx.Client, client: OpenAI) -> None:
    assert [one.id for one in client.models.list().data] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    assert http.get("/health").status_code == 200
    assert http.get("/ready").status_code == 200
    error_of(http.get("/nowhere"), 404)
    error_of(http.get("/v1/completions"), 405)


def test_metrics_count_requests_and_not_paths(http: httpx.Client) -> None:
    def series() -> set[str]:
        lines = http.get("/metrics").text.splitlines()
        return {line.rsplit(" ", 1)[0] for line in lines if line and not line.startswith("#")}

    def strangers(number: int) -> None:
        http.get(f"/{number}")
        http.get(f"/v1/models/{number}")
        http.post("/v1/completions", json={"model": str(number), "prompt": "x"})

    complete(http, max_tokens=2)
    strangers(0)
    before = series()
    for number in range(1, 50):
        strangers(number)
    after = series()
    assert after == before
    text = "\n".join(after)
    for name in ("headwater_requests_total", "headwater_output_tokens_total", "headwater_worker_up"):
        assert name in text
    assert "headwater_time_to_first_token_seconds_bucket" in text
    assert all(line.startswith(("headwater_", "python_", "process_", "target_")) for line in after)


def test_the_next_request_works(pair: Cluster) -> None:
    assert_alive(pair, MODEL)

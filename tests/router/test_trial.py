"""Grammars of clients, tried in a process of its own: none of them harms the gateway."""

import asyncio
import itertools
import json
import signal
import time
from collections.abc import Iterator

import pytest
from llguidance import LLMatcher

from cluster.models import DEFAULT_MODEL, resolve
from router.gateway import trial
from router.gateway.errors import ApiError
from router.gateway.text import Text
from router.gateway.trial import Trials

VOCABULARY = 49152
_numbers = itertools.count()


def good() -> str:
    """One that nobody has tried."""
    return LLMatcher.grammar_from_regex(f"[a-c]{{4}}{next(_numbers)}")


def lark(rules: list[str]) -> str:
    return LLMatcher.grammar_from_lark("\n".join(rules))


def schema(value: object) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(value))


def chain(number: int, link: object) -> str:
    """Definitions each of which refers to the next."""
    text = json.dumps(link)
    links = {f"a{index}": json.loads(text.replace("NEXT", f"#/$defs/a{index + 1}")) for index in range(number)}
    return schema({"$ref": "#/$defs/a0", "$defs": {**links, f"a{number}": {"type": "string"}}})


HARMFUL = {
    "least": lambda: LLMatcher.grammar_from_json_schema({"const": -(2**63)}),
    "rules": lambda: lark(["start: r0", *(f"r{n}: r{n + 1}" for n in range(15_000)), 'r15000: "a"']),
    "terminals": lambda: lark(["start: R0", *(f'R{n}: R{n + 1} "b"' for n in range(8000)), 'R8000: "a"']),
    "references": lambda: chain(4000, {"$ref": "NEXT"}),
    "objects": lambda: chain(2000, {"type": "object", "properties": {"x": {"$ref": "NEXT"}}}),
}
WRONG = {
    "type": (schema({"type": "foo"}), "foo"),
    "regex": (schema({"type": "string", "pattern": "("}), "regex"),
    "nothing fits": (schema({"type": "string", "pattern": "^a$", "minLength": 4}), "nsatisfiable"),
    "cycle": (schema({"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}), "no answer fits"),
    "token": (lark(["start: <|none|>"]), "none"),
    "lark": (lark(["start: ("]), "1(9)"),
}


@pytest.fixture(scope="module")
def text() -> Text:
    return Text(resolve(DEFAULT_MODEL))


@pytest.fixture(scope="module")
def trials(text: Text) -> Iterator[Trials]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("router.gateway.trial.COMPILE_S", 0.3)
        made = Trials(text, VOCABULARY)
        yield made


def refused(trials: Trials, grammar: str) -> str:
    with pytest.raises(ApiError) as raised:
        asyncio.run(trials.check(grammar, "guided_json"))
    assert raised.value.status == 400
    assert raised.value.param == "guided_json"
    assert raised.value.message.startswith("guided_json: ")
    return raised.value.message


def test_special_tokens_are_the_model_s(trials: Trials) -> None:
    asyncio.run(trials.check(lark(['start: <|im_start|> "a" <|im_end|>']), "f"))


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_followed_is_named(trials: Trials, name: str) -> None:
    grammar, named = WRONG[name]
    assert named in refused(trials, grammar)


@pytest.mark.parametrize(
    "name", ["least", "rules", "terminals", pytest.param("references", marks=pytest.mark.long), "objects"]
)
def test_what_breaks_the_compiler_harms_nobody(trials: Trials, name: str) -> None:
    grammar = HARMFUL[name]()
    assert "too" in refused(trials, grammar)
    asyncio.run(trials.check(good(), "f"))
    assert trials._process is not None
    process = trials._process.pid
    refused(trials, grammar)  # it is known
    assert trials._process.pid == process


def test_what_takes_too_long_is_ended_while_others_go_on(trials: Trials) -> None:
    known = good()
    asyncio.run(trials.check(known, "f"))

    async def run() -> None:
        slow = [schema({"type": "number", "multipleOf": number}) for number in (999_983, 999_979)]
        trial, leaver = (asyncio.create_task(trials.check(one, "f")) for one in slow)
        await asyncio.sleep(0.1)
        leaver.cancel()
        begun = time.monotonic()
        await trials.check(known, "f")
        assert time.monotonic() - begun < 0.1
        with pytest.raises(ApiError, match="takes more than"):
            await trial
        await trials.check(good(), "f")

    asyncio.run(run())


def test_a_process_that_stands_still_is_ended_and_the_next_one_answers(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(trials.check(good(), "f"))
    assert trials._process is not None
    trials._process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(trial, "MAX_WAIT_S", 0.3)
    with pytest.raises(ApiError) as caught:
        asyncio.run(trials.check(lark(['start: "standing still"']), "f"))
    assert caught.value.status == 503
    monkeypatch.undo()
    asyncio.run(trials.check(lark(['start: "standing still"']), "f"))

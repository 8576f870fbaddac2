"""What parameters do to logits and what is told about tokens: alone, and through the engine on every way an answer can
take."""

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from tokenizers import decoders, pre_tokenizers

from tests import model_zoo
from tests.workers.drive import HandOff, answers, assert_idle, engine, finish, output, request, step
from transfer.guide import KEPT, GuideError, Guides
from transfer.messages import Delta, SamplingParams, TokenLogprobs
from workers.engine.logits import Constraints, adjust
from workers.engine.logprobs import logprobs
from workers.engine.model import Model
from workers.engine.prompt_rows import PromptRows

PROMPT = [5, 9, 5, 17, 3, 40, 41, 42, 5, 9, 11, 60, 61, 62, 63, 64, 65, 2, 8, 7]
EOS = frozenset([2])


def adjusted(tokens: list[int], output: int, **params: object) -> torch.Tensor:
    row = torch.arange(10, dtype=torch.float32) - 4
    seen = np.isin(np.arange(10), tokens) if "repetition_penalty" in params else None
    own = np.array(tokens[len(tokens) - output :], dtype=np.int32)
    adjust(row, Constraints(SamplingParams(9, **params), seen, own, EOS, None))  # type: ignore[arg-type]
    return row


def test_penalties_look_at_the_output_and_repetition_at_the_prompt_too() -> None:
    row = adjusted([7, 7, 7, 8, 8, 1], output=3, presence_penalty=0.5, frequency_penalty=1.0)
    assert row[7] == 3.0  # only in the prompt
    assert row[8] == 4.0 - 0.5 - 2.0
    assert row[1] == -3.0 - 0.5 - 1.0
    row = adjusted([7, 1, 9], output=1, repetition_penalty=2.0)
    assert (row[7], row[1], row[9], row[8]) == (1.5, -6.0, 2.5, 4.0)


def test_bias_is_added_and_tokens_outside_the_logits_are_none() -> None:
    row = adjusted([1], output=0, logit_bias=((0, 50.0), (9, -100.0), (5000, 3.0)))
    assert (row[0], row[9], row[8]) == (46.0, -95.0, 4.0)


def test_no_ending_before_min_tokens() -> None:
    assert adjusted([1, 1], output=1, min_tokens=2)[2] == -torch.inf
    assert adjusted([1, 1], output=2, min_tokens=2)[2] == -2.0


def test_logprobs_are_of_the_logits() -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(1))
    expected = logits.double().log_softmax(-1)
    for row, one in enumerate(logprobs(logits, [4, 5, 6], 3)):
        assert one.token == row + 4
        assert one.logprob == pytest.approx(float(expected[row, one.token]), abs=1e-5)
        best = expected[row].topk(3)
        assert [token for token, _ in one.top] == best.indices.tolist()
        assert [number for _, number in one.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert logprobs(logits, [1, 2, 3], 0)[0].top == ()


def test_prompt_logprobs_are_the_model_s_in_any_chunks_and_whatever_is_cached(tiny: Model) -> None:
    told = []
    for config in ({}, {"step_tokens": 16, "block_size": 4}, {"prefix_cache": False}):
        one = engine(tiny, **config)
        answers(one, [request(PROMPT, 2)])  # all of it is cached now
        deltas: list[Delta] = []
        wanted = request(PROMPT, 3, prompt_logprobs=4)
        one.add(wanted)
        finish(one, [wanted.request_id], deltas)
        assert [len(delta.prompt_logprobs) for delta in deltas] == [len(PROMPT) - 1, 0, 0]
        assert deltas[0].cached_tokens == 0
        assert [entry.token for entry in deltas[0].prompt_logprobs] == PROMPT[1:]
        told.append(deltas[0].prompt_logprobs)
        assert_idle(one)
    for other in told[1:]:
        same(told[0], other)
    # The last prompt token's distribution is also what a prompt without it would have told of its first output token.
    shorter = request(PROMPT[:-1], 1, logprobs=4)
    one, deltas = engine(tiny), []
    one.add(shorter)
    finish(one, [shorter.request_id], deltas)
    last = told[0][-1]
    assert [token for token, _ in deltas[0].logprobs[0].top] == [token for token, _ in last.top]
    assert [number for _, number in deltas[0].logprobs[0].top] == pytest.approx([n for _, n in last.top], abs=1e-4)


def same(one: tuple[TokenLogprobs, ...], other: tuple[TokenLogprobs, ...], tolerance: float = 1e-4) -> None:
    assert [entry.token for entry in one] == [entry.token for entry in other]
    assert [entry.logprob for entry in one] == pytest.approx([entry.logprob for entry in other], abs=tolerance)
    for a, b in zip(one, other, strict=True):
        assert [number for _, number in a.top] == pytest.approx([number for _, number in b.top], abs=tolerance)


PARAMETERS = {
    "plain": {},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
    "bias": {"logit_bias": ((7, 3.0), (11, -100.0))},
    "min_tokens": {"min_tokens": 5, "ignore_eos": False},
    "min_p": {"temperature": 1.0, "min_p": 0.2, "seed": 3},
    "drawn": {"temperature": 1.2, "top_p": 0.9, "seed": 5, "frequency_penalty": 1.0},
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_way_gives_the_same_tokens_and_logprobs(tiny: Model, name: str) -> None:
    """Cold, warm, in chunks, handed over, and resumed after each number of tokens."""
    params = {"logprobs": 2, **PARAMETERS[name]}
    one = engine(tiny, block_size=4)
    runs = []
    for _ in range(2):
        wanted, deltas = request(PROMPT, 8, **params), []
        one.add(wanted)
        finish(one, [wanted.request_id], deltas)
        runs.append(deltas)
    chunked, deltas = engine(tiny, block_size=4, step_tokens=4), []
    wanted = request(PROMPT, 8, **params)
    chunked.add(wanted)
    finish(chunked, [wanted.request_id], deltas)
    runs.append(deltas)
    handed = HandOff(engine(tiny, block_size=4), engine(tiny, block_size=4), request(PROMPT, 8, **params))
    handed.run()
    runs.append(handed.deltas)
    expected = output(runs[0], runs[0][0].request_id)
    told = tuple(entry for delta in runs[0] for entry in delta.logprobs)
    assert [entry.token for entry in told] == expected
    for deltas in runs[1:]:
        assert output(deltas, deltas[0].request_id) == expected
        same(told, tuple(entry for delta in deltas for entry in delta.logprobs))
    for sent in range(1, len(expected)):
        resumed = request([*PROMPT, *expected[:sent]], 8 - sent, **params)
        assert answers(one, [replace(resumed, answered=sent)]) == [expected[sent:]]


def test_parameters_change_what_they_are_for(tiny: Model) -> None:
    one = engine(tiny)
    plain = answers(one, [request(PROMPT, 8)])[0]
    assert answers(one, [request(PROMPT, 8, logit_bias=((plain[0], -100.0),))])[0][0] != plain[0]
    many = answers(one, [request(PROMPT, 40, frequency_penalty=2.0)])[0]
    assert len(set(many)) > len(set(answers(one, [request(PROMPT, 40)])[0]))
    certain = answers(one, [request(PROMPT, 8, temperature=5.0, min_p=1.0, seed=1)])[0]
    assert certain == plain


def test_an_embedding_is_the_mean_of_the_last_hidden_states(tiny: Model) -> None:
    with torch.inference_mode():
        found = []
        for config in ({}, {"step_tokens": 16, "block_size": 4}):
            one = engine(tiny, **config)
            answers(one, [request(PROMPT, 2)])
            asked = replace(request(PROMPT, 1), embed=True)
            other = request(PROMPT[::-1], 3)
            one.add(other)
            one.add(asked)
            deltas: list[Delta] = []
            finish(one, [asked.request_id, other.request_id], deltas)
            vector = next(delta.embedding for delta in deltas if delta.request_id == asked.request_id)
            found.append(np.frombuffer(vector, dtype="<f4"))
            assert_idle(one)
    assert np.allclose(found[0], found[1], atol=1e-5)
    expected = _hidden(tiny)
    assert np.allclose(found[0], expected.mean(dim=0).numpy(), atol=1e-4)


def _hidden(model: Model) -> torch.Tensor:
    """The hidden states of the prompt in one pass of its own."""
    one = engine(model, prefix_cache=False)
    one.add(request(PROMPT, 1))
    step(one)
    return model.hidden


# --- grammars ------------------------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}
GRAMMAR = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})


@pytest.fixture(scope="module")
def guides(zoo: Callable[[str], Path]) -> Guides:
    return Guides(zoo("llama"), model_zoo.VOCABULARY, frozenset([model_zoo.EOS]))


def bytes_of(tokens: list[int]) -> bytes:
    """The tiny model's first tokens are bytes, in an order of their own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return decoders.ByteLevel().decode([alphabet[token] for token in tokens if token < 256]).encode()


def test_an_answer_follows_its_grammar_whoever_goes_on_with_it(tiny: Model, guides: Guides) -> None:
    for seed in range(4):
        params = {"guide": GRAMMAR, "temperature": 1.0, "seed": seed, "ignore_eos": False}
        one, wanted = engine(tiny), request(PROMPT, 60, **params)
        one.add(wanted, guide=guides.compile(GRAMMAR))
        deltas: list[Delta] = []
        finish(one, [wanted.request_id], deltas)
        tokens = output(deltas, wanted.request_id)
        assert deltas[-1].finish_reason == "stop"
        answer = json.loads(bytes_of(tokens))
        assert answer["kind"] in ("cat", "dog")
        assert 0 <= answer["legs"] <= 9

        p, d, again = engine(tiny), engine(tiny), request(PROMPT, 60, **params)
        handed = HandOff(p, d, again, lambda: guides.compile(GRAMMAR))
        assert handed.run() == tokens

        sent = len(tokens) // 2
        resumed = request([*PROMPT, *tokens[:sent]], 60 - sent, **params)
        one.add(replace(resumed, answered=sent), guide=guides.compile(GRAMMAR))
        deltas = []
        finish(one, [resumed.request_id], deltas)
        assert output(deltas, resumed.request_id) == tokens[sent:]


def test_an_answer_that_left_its_grammar_ends_with_an_error(tiny: Model, guides: Guides) -> None:
    one = engine(tiny)
    resumed = request([*PROMPT, 100, 101, 102], 9, guide=GRAMMAR)
    one.add(replace(resumed, answered=3), guide=guides.compile(GRAMMAR))
    deltas = step(one).deltas
    assert deltas[0].refused
    assert "grammar" in str(deltas[0].error)
    assert_idle(one)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "foo"},
        {"type": "string", "pattern": "("},
        {"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}},
    ],
    ids=["type", "regex", "cycle"],
)
def test_what_cannot_be_compiled_is_told_soon(guides: Guides, schema: object) -> None:
    guides.compile(GRAMMAR)
    begun = time.monotonic()
    with pytest.raises(GuideError):
        guides.compile(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    assert time.monotonic() - begun < 5


def test_a_huge_grammar_takes_bounded_time(guides: Guides) -> None:
    items = {"type": "string", "pattern": "(x+x+)+y{1,30000}(.{3,3000}z){2,900}"}
    begun = time.monotonic()
    with contextlib.suppress(GuideError):
        guides.compile(
            LLMatcher.grammar_from_json_schema({"type": "array", "items": items, "minItems": 9999})
        ).allowed()
    assert time.monotonic() - begun < 5


def test_so_many_grammars_are_kept_and_each_answer_has_its_own_state(guides: Guides) -> None:
    first = guides.compile(GRAMMAR)
    first.accept(np.flatnonzero(first.allowed()).tolist()[:1])
    assert not np.array_equal(guides.compile(GRAMMAR).allowed(), first.allowed())
    for number in range(KEPT + 5):
        guides.compile(LLMatcher.grammar_from_regex(f"a{{{number + 1}}}"))
    assert len(guides._compiled) == KEPT


def test_a_prompt_that_is_pushed_back_is_told_of_once() -> None:
    logits = torch.randn(9, 20, generator=torch.Generator().manual_seed(2))
    hidden = torch.randn(9, 4, generator=torch.Generator().manual_seed(3))
    once, again = (PromptRows(np.arange(1, 10, dtype=np.int32), 2) for _ in range(2))
    for rows, chunks in ((once, [(0, 9)]), (again, [(0, 6), (0, 2), (2, 4), (4, 9)])):
        for start, stop in chunks:
            rows.add_logits(start, logits[start:stop])
            rows.add_hidden(start, hidden[start:stop])
    assert [entry.token for entry in again.logprobs] == list(range(2, 10))
    same(tuple(once.logprobs), tuple(again.logprobs))
    assert np.allclose(np.frombuffer(once.embedding, "<f4"), np.frombuffer(again.embedding, "<f4"), atol=1e-6)

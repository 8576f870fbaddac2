"""The prompts of the exactness tests and their reference answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MANY_TOKENS, FEW_TOKENS = 48, 24
BLOCK = 16
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 10 * BLOCK + 3, 500, 1500)
SHORT, MIDDLE = 100, 500  # tokens; what is generated together
QUESTIONS = (
    "What is the capital of France?",
    "Name three rivers of Europe.",
    "Write one sentence about the sea.",
    "How many legs has a spider?",
    "What do bees make?",
    "Which planet is the largest?",
    "Who wrote Hamlet?",
    "What colour is the sky at night?",
)
STORY = (
    "The river begins as a thread of water under a stone, high where the snow stays until June. It passes the mill, "
    "the school and the market, and in each place somebody has a different name for it. "
)


@dataclass(frozen=True)
class Case:
    """A prompt in token ids and the tokens that follow it, greedily, in float32."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def all_prompts(model: Path) -> list[tuple[int, ...]]:
    """24 prompts: texts of the lengths where blocks begin and end, questions, and chats of three turns."""
    return _texts(model, LENGTHS) + _chats(model, range(8))


def some_prompts(model: Path) -> list[tuple[int, ...]]:
    """One or two of each kind, the longest of them of two chunks: what `make test` has the time for."""
    return _texts(model, (*LENGTHS[:6], 600)) + _chats(model, range(2))


def _texts(model: Path, lengths: Sequence[int]) -> list[tuple[int, ...]]:
    story = AutoTokenizer.from_pretrained(model)(STORY * 40)["input_ids"]
    return [tuple(story[start : start + length]) for start, length in enumerate(lengths)]


def _chats(model: Path, which: Sequence[int]) -> list[tuple[int, ...]]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = [_chat(tokenizer, [QUESTIONS[i]]) for i in which]
    return chats + [_chat(tokenizer, [QUESTIONS[i], QUESTIONS[i - 1], QUESTIONS[i - 2]]) for i in which]


def _chat(tokenizer, questions: list[str]) -> tuple[int, ...]:  # type: ignore[no-untyped-def]
    messages = []
    for question in questions:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": "I will think about it."}]
    return tuple(tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False))


def cases(model: Path, prompts: Sequence[tuple[int, ...]], tokens: int) -> list[Case]:
    """Prompts with the first `tokens` that `transformers` generates for them, an end-of-sequence token being like any
    other. Prompts of similar length are generated together, padded on the left: a step costs almost the same for all
    of them as for one."""
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    module.generation_config.eos_token_id = None
    answers: dict[int, tuple[int, ...]] = {}
    shortest = 0
    for longest in (SHORT, MIDDLE, max(map(len, prompts))):
        group = [index for index, prompt in enumerate(prompts) if shortest < len(prompt) <= longest]
        answers |= zip(group, _generate(module, [prompts[index] for index in group], tokens), strict=True)
        shortest = longest
    return [Case(prompt, answers[index]) for index, prompt in enumerate(prompts)]


def _generate(module, prompts: list[tuple[int, ...]], tokens: int) -> list[tuple[int, ...]]:  # type: ignore[no-untyped-def]
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        whole = module.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
    return [tuple(row) for row in whole[:, longest:].tolist()]

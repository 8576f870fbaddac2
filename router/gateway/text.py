"""Text in and out: chat templates, tokenization, incremental detokenization and stop strings."""

from __future__ import annotations

import inspect
import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from router.gateway.errors import invalid
from transfer.guide import described

REPLACEMENT = "\ufffd"


class Text:
    """A model's tokenizer and chat template. Any thread may call."""

    def __init__(self, path: Path, chat_template: str | None = None) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path)
        if chat_template is not None:
            self._tokenizer.chat_template = chat_template
        self._fast: Tokenizer = self._tokenizer._tokenizer
        # For text in which nothing is a special token, whatever it says.
        self._plain: Tokenizer = Tokenizer.from_str(self._fast.to_str())
        self._plain.encode_special_tokens = True
        own = inspect.signature(self._tokenizer.apply_chat_template).parameters
        self._own_values = {"messages", *own, *self._tokenizer.special_tokens_map}
        vocabulary = self._tokenizer.get_vocab()
        self._longest_token = max(map(len, vocabulary))
        added = self._fast.get_added_tokens_decoder()
        self._specials = {token.content: number for number, token in added.items() if token.special}
        names = sorted(map(re.escape, self._specials), key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(names)})" if names else "(?!)")
        self._added = {number: token.content for number, token in added.items()}
        self._letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
        self._byte_level = all(letter in vocabulary for letter in ("Ġ", "Ċ", "Ã"))

    @property
    def template(self) -> str | None:
        """The chat template's source."""
        template = self._tokenizer.chat_template
        return template.get("default") if isinstance(template, dict) else template

    @property
    def description(self) -> str:
        """The tokenizer as JSON."""
        return described(self._fast)

    @property
    def size(self) -> int:
        """Number of tokens that the tokenizer knows."""
        return self._fast.get_vocab_size()

    @property
    def eos(self) -> int | None:
        """The token that ends an answer, as the tokenizer has it."""
        return self._tokenizer.eos_token_id

    @property
    def specials(self) -> dict[str, int]:
        """The special tokens by their texts."""
        return self._specials

    @property
    def added(self) -> dict[str, int]:
        """All tokens that were added to the vocabulary, special ones and others, by their texts."""
        return {content: number for number, content in self._added.items()}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text as it stands, with the special tokens that the model puts around a text."""
        return _ids(self._fast, text, add_special_tokens)

    def check_size(self, characters: int, tokens: int, field: str) -> None:
        """Raises ApiError for a text of so many characters that cannot fit into so many tokens, told without tokenizing
        it."""
        if characters > tokens * self._longest_token:
            raise invalid(
                f"{field}: {characters} characters are more than the context of {tokens} tokens can hold",
                field,
                "context_length_exceeded",
            )

    def chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        template_values: dict[str, Any] | None = None,
        most: int | None = None,
    ) -> tuple[list[int], str]:
        """Token ids of a chat up to where the assistant answers, and the end of their text. What looks like a special
        token in a message stays text. Raises ApiError 400 with the template's refusal, and for what is certainly more
        than `most` tokens."""
        if not self._tokenizer.chat_template:
            raise invalid("this model has no chat template; use /v1/completions", "messages")
        if taken := self._own_values & set(template_values or {}):
            name = f"chat_template_kwargs.{min(taken)}"
            raise invalid(f"{name}: is not for clients to set", name)
        guard = _Guard(self._specials, self._special)
        messages, tools, values = (guard.hide(one) for one in (messages, tools, template_values or {}))
        try:
            rendered = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True, **values
            )
        except Exception as error:  # a template fails in as many ways as what it is given can be wrong
            raise invalid(f"messages: the chat template refuses them: {error}", "messages") from None
        if most is not None:
            self.check_size(len(rendered), most, "messages")
        if not guard.hidden:
            return self.encode(rendered, add_special_tokens=False), rendered[-200:]
        return self._encode_guarded(rendered, guard), guard.shown(rendered[-200:])

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return str(self._fast.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def name(self, token: int) -> str:
        """How a token is shown by itself; a special one by its name."""
        return self._added.get(token) or self._bytes(token).decode(errors="replace")

    def bytes_of(self, token: int, first: bool = False) -> bytes:
        """What a token adds to a text, nothing for a special one; `first` in it, where some tokenizers leave out the
        space before a word."""
        if token in self._added:
            content = self._added[token]
            return b"" if content in self._specials else content.encode()
        data = self._bytes(token)
        return data[1:] if first and data[:1] == b" " and not self.decode([token]).startswith(" ") else data

    def stream(self, stops: list[str], visible: Sequence[str] = ()) -> TextStream:
        """An incremental decoder for one answer, in which the special tokens `visible` are text."""
        shown = {self._specials[token]: token for token in visible if token in self._specials}
        return TextStream(self._fast, stops, shown)

    def _bytes(self, token: int) -> bytes:
        piece = self._fast.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level:
            return bytes(self._letters[letter] for letter in piece if letter in self._letters)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("▁", " ").encode()

    def _encode_guarded(self, rendered: str, guard: _Guard) -> list[int]:
        """Token by token of the template's own special tokens, and between them text in which there are none."""
        ids: list[int] = []
        for part in self._special.split(rendered):
            if part in self._specials:
                ids.append(self._specials[part])
            elif part:
                ids += _ids(self._plain, guard.shown(part), add_special_tokens=False)
        return ids


def _ids(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    # As a batch of one: only batches leave the interpreter to other threads meanwhile.
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


class _Guard:
    """Hides the names of special tokens in what a user wrote, so that a template's own can be told from them."""

    def __init__(self, names: Iterable[str], special: re.Pattern[str]) -> None:
        self._names = list(names)
        self._special = special
        self._salt = secrets.token_hex(8)
        self._hidden: list[str] = []

    @property
    def hidden(self) -> bool:
        """Whether there was anything to hide."""
        return bool(self._hidden)

    def hide(self, value: Any) -> Any:
        """The same value with marks in the place of special tokens, in strings at any depth."""
        if isinstance(value, str):
            # Looking for each name is much faster than the pattern, and leaves the interpreter to others between.
            return self._special.sub(self._mark, value) if any(name in value for name in self._names) else value
        if isinstance(value, list):
            return [self.hide(one) for one in value]
        if isinstance(value, dict):
            return {self.hide(key): self.hide(one) for key, one in value.items()}
        return value

    def shown(self, text: str) -> str:
        """The text as it was."""
        return re.sub(f"\ue000{self._salt}([0-9]+)\ue001", lambda mark: self._hidden[int(mark[1])], text)

    def _mark(self, found: re.Match[str]) -> str:
        self._hidden.append(found[0])
        return f"\ue000{self._salt}{len(self._hidden) - 1}\ue001"


class TextStream:
    """Turns tokens into text piece by piece. Characters come whole; text that may begin a stop string is held back;
    from a stop string on nothing comes out any more, and `stopped` is that string."""

    def __init__(self, tokenizer: Tokenizer, stops: list[str], visible: dict[int, str]) -> None:
        self._tokenizer = tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._stops = stops
        self._visible = visible
        self._longest = max((len(stop) for stop in stops), default=1) - 1
        self._tokens: list[int] = []
        self._decoded = ""
        self._segment = 0
        self._given = 0
        self.stopped: str | None = None

    def push(self, token: int) -> str:
        """Add a token; returns the text that is certain by now."""
        if self.stopped is not None:
            return ""
        if token in self._visible:
            self._new_segment()
            self._decoded += self._visible[token]
            self._segment = len(self._decoded)
        else:
            self._step(token)
        return self._give(self._held_back())

    def finish(self) -> str:
        """The rest: text that was held back, and what an incomplete last character decodes to."""
        if self.stopped is not None:
            return ""
        self._complete()
        return self._give(0)

    def _step(self, token: int) -> None:
        try:
            text = self._decoder.step(self._tokenizer, token)
        except Exception:  # its own; bytes that are no character and then another token are too much for it
            self._new_segment()
            text = self._decoder.step(self._tokenizer, token)
        self._tokens.append(token)
        self._decoded += text or ""

    def _new_segment(self) -> None:
        """Decode what follows by itself."""
        self._complete()
        self._decoder, self._tokens = DecodeStream(skip_special_tokens=True), []
        self._segment = len(self._decoded)

    def _complete(self) -> None:
        """Decode what the incremental decoder still holds back."""
        whole = self._decoded[: self._segment] + self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        if whole.startswith(self._decoded):
            self._decoded = whole

    def _give(self, keep: int) -> str:
        """Text from where the last piece ended, up to a stop string or all but the last `keep` characters."""
        starts = [(self._decoded.find(stop, max(0, self._given - len(stop))), stop) for stop in self._stops]
        # The one that is complete first counts, so that the borders of tokens make no difference.
        found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        end = len(self._decoded) - keep
        if found:
            _, end, self.stopped = min(found)
        piece = self._decoded[self._given : end] if end > self._given else ""
        self._given = max(self._given, end)
        return piece

    def _held_back(self) -> int:
        """Length of the longest end of the text that is the beginning of a stop string."""
        end, most = self._decoded[-self._longest :] if self._longest else "", 0
        for stop in self._stops:
            start = end.find(stop[0])
            while start >= 0 and len(end) - start > most:
                if stop.startswith(end[start:]):
                    most = len(end) - start
                start = end.find(stop[0], start + 1)
        return most

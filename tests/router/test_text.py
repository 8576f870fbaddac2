"""Incremental detokenization and stop strings, on the default model's tokenizer and on a SentencePiece-style one."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from cluster.models import DEFAULT_MODEL, resolve
from router.gateway.text import Text

TEXTS = ["naïve café, déjà vu", "数学は楽しい。", "👩‍👩‍👧‍👦🏳️‍🌈", "a  b   c\n\n\td", "ß∂ƒ 1234  5", ""]


@pytest.fixture(scope="module")
def bpe() -> Text:
    return Text(resolve(DEFAULT_MODEL))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """Spaces as a visible mark and bytes as fallback, as SentencePiece models have them."""
    path: Path = tmp_path_factory.mktemp("sentencepiece")
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    byte_tokens = [f"<0x{number:02X}>" for number in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>", "</s>", *byte_tokens], show_progress=False)
    tokenizer.train_from_iterator(["the river and the mill in the valley"] * 3, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>").save_pretrained(path)
    return Text(path)


def stream(text: Text, tokens: list[int], stops: list[str]) -> tuple[str, bool, int]:
    """Joined pieces, whether a stop string was met, and how many tokens were looked at."""
    decoder = text.stream(stops)
    joined = ""
    for used, token in enumerate(tokens, 1):
        joined += decoder.push(token)
        if decoder.stopped is not None:
            return joined, True, used
    return joined + decoder.finish(), decoder.stopped is not None, len(tokens)


@pytest.mark.parametrize("kind", ["bpe", "sentencepiece"])
@pytest.mark.parametrize("words", TEXTS)
def test_joined_pieces_equal_the_full_decode(request: pytest.FixtureRequest, kind: str, words: str) -> None:
    text: Text = request.getfixturevalue(kind)
    tokens = text.encode(words)
    for cut in range(len(tokens) + 1):
        assert stream(text, tokens[:cut], [])[0] == text.decode(tokens[:cut])


@given(tokens=st.lists(st.integers(0, 49151), max_size=40))
def test_any_tokens_give_the_full_decode(bpe: Text, tokens: list[int]) -> None:
    joined = stream(bpe, tokens, [])[0]
    assert joined == bpe.decode(tokens)
    joined.encode()


@given(data=st.data())
def test_nothing_comes_out_from_a_stop_string_on(bpe: Text, data: st.DataObject) -> None:
    words = data.draw(st.text(alphabet="ABCDEF ", min_size=1, max_size=40))
    stops = data.draw(st.lists(st.text(alphabet="ABCDEF ", min_size=1, max_size=4), min_size=1, max_size=4))
    tokens = bpe.encode(words)
    whole = bpe.decode(tokens)
    found = [(whole.find(stop) + len(stop), whole.find(stop)) for stop in stops if stop in whole]
    joined, stopped, _ = stream(bpe, tokens, stops)
    assert stopped == bool(found)
    # The stop string that is complete first ends the answer, wherever the borders of tokens are.
    assert joined == (whole[: min(found)[1]] if found else whole)


def test_a_stop_string_over_several_tokens_and_inside_one(bpe: Text) -> None:
    tokens = bpe.encode("ABC DEFGHIJKL MNO")
    assert len(tokens) > 3
    assert stream(bpe, tokens, ["DEFGHIJ"])[:2] == ("ABC ", True)
    assert stream(bpe, tokens, ["EF"])[:2] == ("ABC D", True)
    assert stream(bpe, tokens, ["DEFX"])[:2] == (bpe.decode(tokens), False)


@pytest.mark.parametrize("cut", [["\n", "<0xE2>", "<0x80>", "a"], ["<0x0A>", "<0xE2>", "a", "<0x80>", "<0xE2>"]])
def test_bytes_that_are_no_character_fail_nothing(sentencepiece: Text, cut: list[str]) -> None:
    """As where a length ends a character, and the model goes on with something else."""
    ids = [sentencepiece._fast.token_to_id(piece) for piece in cut]
    tokens = [token for token in ids if token is not None]
    joined, _, used = stream(sentencepiece, tokens, [])
    assert used == len(tokens)
    assert joined.encode()
    assert joined.count("a") == 1


def test_a_special_token_that_template_and_tokenizer_both_put_first_is_there_once(tmp_path: Path) -> None:
    words = ["<unk>", "<s>", "hi", "user", ":"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")
    fast.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['role'] + ' : ' + m['content'] }}{% endfor %}"
    fast.save_pretrained(tmp_path)
    text, chat = Text(tmp_path), [{"role": "user", "content": "hi"}]
    assert text.encode("hi") == [1, 2]
    assert text.chat(chat)[0] == [1, 3, 4, 2] == fast.apply_chat_template(chat, return_dict=False)
    assert text.chat([{"role": "user", "content": "hi <s>"}])[0].count(1) == 1

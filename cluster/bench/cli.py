"""The `headwater bench` commands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.bench.tiers.parts import Part
from cluster.config import ClusterConfig, load
from cluster.signals import interruptible
from cluster.simulate.planner.cli import planner

if TYPE_CHECKING:
    from cluster.bench.report import Report
    from cluster.bench.workload import Workload

app = typer.Typer(no_args_is_help=True, help="Measure the running code.")
app.callback()(interruptible)
app.command("planner")(planner)

Json = Annotated[bool, typer.Option("--json", help="print one JSON object")]
Assert = Annotated[bool, typer.Option("--assert", help="exit 1 unless something was checked and every check holds")]
Config = Annotated[Path | None, typer.Option(help="YAML file of the cluster to measure")]
Model = Annotated[str | None, typer.Option(help="model to serve")]
Dtype = Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16")]
Compare = Annotated[
    bool, typer.Option("--compare-no-reuse/--reuse-only", help="the same work without prefix cache, in turns")
]
Concurrency = Annotated[int, typer.Option(min=1, help="requests under way at a time")]
Rounds = Annotated[int, typer.Option(min=1, help="repetitions, each with other prompts; medians are reported")]
Output = Annotated[int, typer.Option(min=1, help="tokens to generate for each request")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; default: all cores")]


@app.command("shared-prefix")
def shared_prefix(
    prefix: Annotated[int, typer.Option(help="tokens that all prompts share")] = 2000,
    query: Annotated[int, typer.Option(help="tokens of each prompt's own")] = 200,
    output: Output = 64,
    requests: Annotated[int, typer.Option(help="number of prompts")] = 16,
    concurrency: Concurrency = 16,
    rounds: Rounds = 1,
    compare_no_reuse: Compare = False,
    config: Config = None,
    model: Model = None,
    dtype: Dtype = None,
    as_json: Json = False,
    check: Assert = False,
) -> None:
    """Requests behind one long shared prefix: throughput, first token, cached share."""
    from cluster.bench.shared_prefix import SharedPrefix

    workload = SharedPrefix(prefix, query, output, requests, concurrency, rounds)
    _compare(_settings(config, model, dtype), workload, compare_no_reuse, as_json, check)


@app.command("multi-turn")
def multi_turn(
    chats: Annotated[int, typer.Option(min=1, help="number of chats")] = 4,
    turns: Annotated[int, typer.Option(min=2, help="turns of each chat")] = 15,
    system: Annotated[int, typer.Option(min=1, help="tokens of the system prompt that all chats share")] = 800,
    user: Annotated[int, typer.Option(min=1, help="new tokens of the user in each turn")] = 50,
    output: Annotated[int, typer.Option(min=1, help="tokens of each answer")] = 50,
    concurrency: Annotated[int, typer.Option(min=1, help="chats under way at a time")] = 4,
    rounds: Rounds = 1,
    compare_no_reuse: Compare = True,
    config: Config = None,
    model: Model = None,
    dtype: Dtype = None,
    as_json: Json = False,
    check: Assert = False,
) -> None:
    """Chats that grow turn by turn: the first token from turn two on. Each prompt is everything so far, the model's
    real answers included, and new words of the user. A user who reads and thinks is not simulated: the next turn
    begins at once."""
    from cluster.bench.multi_turn import MultiTurn

    workload = MultiTurn(chats, turns, system, user, output, concurrency, rounds)
    _compare(_settings(config, model, dtype), workload, compare_no_reuse, as_json, check)


@app.command("batch-eval")
def batch_eval(
    items: Annotated[int, typer.Option(min=1, help="number of evaluation items")] = 200,
    template: Annotated[int, typer.Option(min=1, help="tokens of the template before each item")] = 1200,
    item: Annotated[int, typer.Option(min=1, help="tokens of each item")] = 50,
    output: Output = 8,
    concurrency: Concurrency = 16,
    rounds: Rounds = 1,
    compare_no_reuse: Compare = True,
    config: Config = None,
    model: Model = None,
    dtype: Dtype = None,
    as_json: Json = False,
    check: Assert = False,
) -> None:
    """Evaluation items behind one template: the time that all of them take, the template's first pass included."""
    from cluster.bench.batch_eval import BatchEval

    workload = BatchEval(items, template, item, output, concurrency, rounds)
    _compare(_settings(config, model, dtype), workload, compare_no_reuse, as_json, check)


@app.command("rag")
def rag(
    requests: Annotated[int, typer.Option(min=1, help="number of questions")] = 160,
    instruction: Annotated[int, typer.Option(min=1, help="tokens of the instruction before the documents")] = 128,
    documents: Annotated[int, typer.Option(min=1, help="documents that there are")] = 16,
    document: Annotated[int, typer.Option(min=1, help="tokens of each document")] = 256,
    retrieved: Annotated[int, typer.Option(min=1, help="documents in each prompt")] = 3,
    question: Annotated[int, typer.Option(min=1, help="tokens of each question")] = 24,
    output: Output = 16,
    zipf: Annotated[float, typer.Option(min=0, help="exponent of the documents' popularity; 0 is uniform")] = 1.2,
    concurrency: Concurrency = 16,
    rounds: Rounds = 1,
    compare_no_reuse: Compare = True,
    config: Config = None,
    model: Model = None,
    dtype: Dtype = None,
    as_json: Json = False,
    check: Assert = False,
) -> None:
    """Questions over shared documents: throughput. No retriever runs and no text is real: documents are random
    tokens, drawn by Zipf's law and ordered by popularity, the most popular first. This favours the cache, which
    reuses beginnings only: a document counts only where the same ones precede it. Few documents and a steep law
    (the defaults) are what a narrow help desk sees; try --documents 100 --zipf 1 for a broad one."""
    from cluster.bench.rag import Rag

    if retrieved > documents:
        raise typer.BadParameter(f"there are only {documents} documents", param_hint="--retrieved")
    workload = Rag(requests, instruction, documents, document, retrieved, question, output, zipf, concurrency, rounds)
    _compare(_settings(config, model, dtype), workload, compare_no_reuse, as_json, check)


@app.command("batch")
def batch(
    items: Annotated[int, typer.Option(min=1, help="requests of a batch")] = 2000,
    templates: Annotated[int, typer.Option(min=2, help="templates that they stand behind, in random order")] = 5,
    template: Annotated[int, typer.Option(min=64, help="tokens of each template")] = 512,
    item: Annotated[int, typer.Option(min=1, help="tokens of each request's own")] = 24,
    output: Annotated[int, typer.Option(min=1, help="tokens of each answer")] = 8,
    concurrency: Concurrency = 16,
    interactive: Annotated[int, typer.Option(min=0, help="requests of somebody who waits; 0: there is nobody")] = 40,
    prompt: Annotated[int, typer.Option(min=1, help="tokens of each of these, all different")] = 500,
    pause: Annotated[float, typer.Option(min=0, help="seconds between an answer and the next of them")] = 0.5,
    rounds: Rounds = 1,
    kv_memory: Annotated[
        str, typer.Option(help="KV pool of each worker: two templates and what else is under way have to fill it")
    ] = "46MiB",
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file of the cluster to measure; one worker with both roles if it sets none"),
    ] = None,
    model: Model = None,
    dtype: Dtype = None,
    as_json: Json = False,
    check: Assert = False,
) -> None:
    """A batch whose requests share templates, more than the cache holds: its time with grouping and in the file's
    order, and how long somebody else waits for a first token beside it."""
    from cluster.bench.batch import Shape, run
    from cluster.bench.peers.run import with_roles

    shape = Shape(items, templates, template, item, output, concurrency, interactive, prompt, pause, rounds)
    longest = max(template + item + output, prompt + 1) + 16
    sizes = {"worker.kv_memory": kv_memory, "worker.max_model_len": longest}
    settings = load(config, {"model.name": model, "worker.dtype": dtype, **sizes})
    _report(run(with_roles(settings), shape), as_json, check)


@app.command("no-reuse-cost")
def no_reuse_cost(
    requests: Annotated[int, typer.Option(min=1, help="prompts in a round")] = 16,
    prompt: Annotated[int, typer.Option(min=1, help="tokens of each prompt, all different")] = 500,
    output: Output = 32,
    concurrency: Concurrency = 8,
    rounds: Rounds = 7,
    kv_memory: Annotated[str, typer.Option(help="KV pool of each worker, small so that the cache evicts")] = "256MiB",
    config: Config = None,
    model: Model = None,
    dtype: Dtype = None,
    as_json: Json = False,
    check: Assert = False,
) -> None:
    """What the prefix cache costs where nothing can be reused: throughput with and without it, in turns."""
    from cluster.bench.no_reuse_cost import NoReuseCost

    settings = load(config, {"model.name": model, "worker.dtype": dtype, "worker.kv_memory": kv_memory})
    _compare(settings, NoReuseCost(requests, prompt, output, concurrency, rounds), True, as_json, check)


@app.command("tenants")
def tenants(
    requests: Annotated[int, typer.Option(min=1, help="requests of the quiet tenant in a round")] = 6,
    prompt: Annotated[int, typer.Option(min=1, help="tokens of each prompt, all different")] = 1000,
    output: Output = 16,
    loud: Annotated[int, typer.Option(min=1, help="requests that the loud tenant keeps under way")] = 10,
    pause: Annotated[float, typer.Option(min=0, help="seconds between an answer and the quiet tenant's next")] = 20,
    rounds: Rounds = 1,
    config: Config = None,
    model: Model = None,
    dtype: Dtype = None,
    as_json: Json = False,
    check: Assert = False,
) -> None:
    """A quiet tenant's time to first token, alone and beside a loud one. Tenants are told apart by `user`."""
    from cluster.bench.tenants import Shape, run

    _report(run(_settings(config, model, dtype), Shape(requests, prompt, output, loud, pause, rounds)), as_json, check)


@app.command("first-token")
def first_token(
    prompt: Annotated[int, typer.Option(help="prompt tokens")] = 16,
    requests: Annotated[int, typer.Option(help="number of requests")] = 40,
    config: Config = None,
    model: Model = None,
    dtype: Dtype = None,
    as_json: Json = False,
    check: Assert = False,
) -> None:
    """What the cluster adds to the engine's own time to first token, one request at a time."""
    from cluster.bench.first_token import run

    _report(run(_settings(config, model, dtype), prompt, requests), as_json, check)


@app.command("engine")
def engine(
    context: Annotated[int, typer.Option(min=1, help="tokens of the prompt")] = 2048,
    streams: Annotated[int, typer.Option(min=2, help="sequences that share the prompt")] = 16,
    steps: Annotated[int, typer.Option(min=1, help="decode steps to measure")] = 64,
    rounds: Rounds = 3,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda")] = None,
    threads: Threads = None,
    config: Config = None,
    model: Model = None,
    dtype: Dtype = None,
    as_json: Json = False,
    check: Assert = False,
) -> None:
    """The engine alone, in this process and without Ray: prefill; decode of one stream; decode of several that share
    their prompt, with shared attention on and off."""
    from cluster.bench.engine import Shape, run

    flags = {"model.name": model, "worker.dtype": dtype, "worker.device": device, "worker.threads": threads}
    _report(run(load(config, flags), Shape(context, streams, steps, rounds)), as_json, check)


@app.command("structured")
def structured(
    context: Annotated[int, typer.Option(min=1, help="tokens of each prompt")] = 128,
    streams: Annotated[int, typer.Option(min=1, help="answers at a time")] = 16,
    steps: Annotated[int, typer.Option(min=1, help="decode steps of each round")] = 64,
    rounds: Rounds = 3,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda")] = None,
    threads: Threads = None,
    config: Config = None,
    model: Model = None,
    dtype: Dtype = None,
    as_json: Json = False,
    check: Assert = False,
) -> None:
    """What grammars cost the engine, in this process and without Ray: decode steps with and without a JSON schema, in
    turns; compiling of schemas; and answers beside a grammar that takes long to compile."""
    from cluster.bench.structured import Shape, run

    flags = {"model.name": model, "worker.dtype": dtype, "worker.device": device, "worker.threads": threads}
    _report(run(load(config, flags), Shape(context, streams, steps, rounds)), as_json, check)


@app.command("tier-quality")
def tier_quality(
    prompts: Annotated[int, typer.Option(min=1, help="number of prompts")] = 16,
    prompt: Annotated[int, typer.Option(min=16, help="tokens of each prompt, in whole blocks")] = 512,
    output: Output = 64,
    rounds: Rounds = 3,
    text: Annotated[
        Path | None, typer.Option(help="a text, or a directory of them, to take prompts from; default: Headwater's own")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda")] = None,
    threads: Threads = None,
    config: Config = None,
    model: Model = None,
    dtype: Dtype = None,
    as_json: Json = False,
    check: Assert = False,
) -> None:
    """What blocks lose below the device in each `tiers.format`, in this process and without Ray: greedy answers to
    prompts that come back from it, beside those to prompts that never left the device; sizes; and seconds to copy."""
    from cluster.bench.tier_quality import Shape, run

    flags = {"model.name": model, "worker.dtype": dtype, "worker.device": device, "worker.threads": threads}
    _report(run(load(config, flags), Shape(prompts, prompt, output, rounds), text), as_json, check)


@app.command("tiers")
def tiers(
    prompt: Annotated[int, typer.Option(min=16, help="tokens of a hit")] = 2000,
    guarded: Annotated[int, typer.Option(min=64, help="tokens that the guard may load")] = 1000,
    streams: Annotated[int, typer.Option(min=1, help="answers that run while much goes down")] = 8,
    demoted: Annotated[str, typer.Option(help="bytes that go down meanwhile, such as 1GB")] = "1GB",
    conversations: Annotated[int, typer.Option(min=3, help="conversations over a device that holds two")] = 20,
    turns: Annotated[int, typer.Option(min=1, help="turns of each conversation")] = 10,
    first: Annotated[int, typer.Option(min=1, help="tokens before the first question")] = 800,
    question: Annotated[int, typer.Option(min=1, help="tokens of each question")] = 60,
    output: Annotated[int, typer.Option(min=1, help="tokens of each answer in a conversation")] = 16,
    requests: Annotated[int, typer.Option(min=1, help="prompts in a round of different ones")] = 8,
    different: Annotated[int, typer.Option(min=1, help="tokens of each of those")] = 500,
    rounds: Rounds = 5,
    only: Annotated[list[Part] | None, typer.Option(help="leave out the other parts; may be repeated")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda")] = None,
    threads: Threads = None,
    config: Config = None,
    model: Model = None,
    dtype: Dtype = None,
    as_json: Json = False,
    check: Assert = False,
) -> None:
    """Host memory and disk below the device, in this process and without Ray: first tokens behind what they have; the
    guard at several speeds of loading; running answers while much goes down; conversations over a small device; and
    different prompts, for which tiers only cost. Files go to a new directory in tiers.disk_path, or where the system
    has temporary files, and are deleted in the end."""
    from cluster.bench.tiers.run import run
    from cluster.bench.tiers.shape import Shape
    from workers.config import parse_bytes

    try:
        size = parse_bytes(demoted)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--demoted") from None
    flags = {"model.name": model, "worker.dtype": dtype, "worker.device": device, "worker.threads": threads}
    sizes = (prompt, guarded, streams, size, conversations, turns, first, question, output, requests, different, rounds)
    _report(run(load(config, flags), Shape(*sizes), tuple(only or Part)), as_json, check)


@app.command("transfer")
def transfer(
    prompt: Annotated[int, typer.Option(min=1, help="tokens of each prompt that is handed over")] = 2048,
    output: Output = 16,
    length: Annotated[
        list[int] | None, typer.Option(min=1, help="prompt length of the grid, may be repeated; default: 16 to 4,096")
    ] = None,
    share: Annotated[
        list[float] | None,
        typer.Option(min=0, max=1, help="cached share of the grid, may be repeated; default: 0 to 1"),
    ] = None,
    streams: Annotated[int, typer.Option(min=1, help="answers that a long prompt disturbs")] = 8,
    long: Annotated[int, typer.Option(min=1, help="tokens of that prompt")] = 4000,
    rounds: Rounds = 5,
    config: Config = None,
    model: Model = None,
    dtype: Dtype = None,
    as_json: Json = False,
    check: Assert = False,
) -> None:
    """A prefill and a decode worker beside one worker with both roles, one request at a time: first and second token of
    long prompts, a grid of prompt lengths and cached shares, and running answers while a long prompt is computed. And
    the KV channel between two processes beside NIXL by itself."""
    from cluster.bench.transfer.run import LENGTHS, SHARES, Shape, run

    shape = Shape(prompt, output, tuple(length or LENGTHS), tuple(share or SHARES), streams, long, rounds)
    _report(run(_settings(config, model, dtype), shape), as_json, check)


@app.command("peers")
def peers(
    llama_server: Annotated[str | None, typer.Option(help="llama.cpp's llama-server")] = None,
    llama_bench: Annotated[str | None, typer.Option(help="llama.cpp's llama-bench")] = None,
    llama_batched_bench: Annotated[str | None, typer.Option(help="llama.cpp's llama-batched-bench")] = None,
    gguf: Annotated[Path | None, typer.Option(help="the same weights for llama.cpp, in bfloat16")] = None,
    transformers: Annotated[bool, typer.Option("--transformers", help="transformers' generate_batch too")] = False,
    transformers_batch: Annotated[
        int, typer.Option(min=1, help="tokens in a batch of generate_batch; its own default is 8192")
    ] = 256,
    png: Annotated[Path | None, typer.Option(help="draw the table into this file (needs matplotlib)")] = None,
    prefix: Annotated[int, typer.Option(min=1, help="tokens that the shared prompts share")] = 2000,
    query: Annotated[int, typer.Option(min=1, help="tokens of each shared prompt's own")] = 200,
    prompt: Annotated[int, typer.Option(min=1, help="tokens of each different prompt")] = 250,
    output: Output = 64,
    requests: Annotated[int, typer.Option(min=1, help="number of shared prompts")] = 16,
    different: Annotated[int, typer.Option(min=1, help="number of different prompts")] = 32,
    concurrency: Concurrency = 16,
    context: Annotated[int, typer.Option(min=1, help="prompt tokens for the engines alone")] = 2048,
    streams: Annotated[int, typer.Option(min=2, help="sequences that share that prompt")] = 16,
    steps: Annotated[int, typer.Option(min=1, help="decode steps of the engines alone")] = 64,
    rounds: Rounds = 1,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of the peers and of the engine alone; default: all cores")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file of the cluster to measure; one worker with both roles if it sets none"),
    ] = None,
    model: Model = None,
    dtype: Dtype = None,
    as_json: Json = False,
    check: Assert = False,
) -> None:
    """Headwater against other servers of this machine, one after another, on the same prompts and with the same
    client: serving behind a shared prefix, serving of different prompts, and the engines alone. What is not given is
    left out with a note, and its checks with it; what fails is a check that is missed. Servers run in what is their
    best setting on one machine: Headwater as one worker with both roles, llama.cpp with one slot for the shared prefix
    and as many slots as requests under way for different prompts, generate_batch with small batches."""
    from cluster.bench.peers import chart
    from cluster.bench.peers.generate_batch import Transformers
    from cluster.bench.peers.llama_cpp import LlamaCpp
    from cluster.bench.peers.run import run, with_roles
    from cluster.bench.peers.shape import Shape

    if png is not None:
        chart.check_png(png)
    shape = Shape(prefix, query, prompt, output, requests, different, concurrency, context, streams, steps, rounds)
    llama = LlamaCpp(gguf, llama_server, llama_bench, llama_batched_bench, threads or len(os.sched_getaffinity(0)))
    settings = with_roles(_settings(config, model, dtype))
    report = run(settings, shape, llama, Transformers(transformers_batch) if transformers else None)
    if png is not None:
        chart.draw(report, png)
    _report(report, as_json, check)


@app.command("router")
def router(
    workers: Annotated[list[int], typer.Option(min=1, help="size of a view; may be repeated")] = [100, 1000],  # noqa: B006
    keys: Annotated[int, typer.Option(min=64, help="prefix keys that each worker publishes")] = 6250,
    prompt: Annotated[int, typer.Option(min=64, help="tokens of a prompt")] = 8000,
    decisions: Annotated[int, typer.Option(min=10, help="decisions of each view")] = 1000,
    as_json: Json = False,
    check: Assert = False,
) -> None:
    """The router alone: time of a decision, without tokenizing, and memory of a view of many workers."""
    from cluster.bench.routing import Shape, run

    _report(run(Shape(tuple(workers), keys, prompt, decisions)), as_json, check)


@app.command("gateway")
def gateway(
    streams: Annotated[int, typer.Option(min=1, help="streams at a time")] = 100,
    tokens: Annotated[
        int, typer.Option(min=1, max=4000, help="tokens of each stream while the rate is measured")
    ] = 400,
    firsts: Annotated[int, typer.Option(min=1, help="requests of each measurement of first tokens")] = 300,
    requests: Annotated[int, typer.Option(min=0, help="requests while memory is watched; 0: it is not")] = 20_000,
    config: Config = None,
    model: Annotated[str | None, typer.Option(help="model whose tokenizer is used")] = None,
    as_json: Json = False,
    check: Assert = False,
) -> None:
    """The gateway alone, with recorded tokens in place of workers: tokens a second of many streams, what it adds to the
    first token, and whether its memory grows."""
    from cluster.bench.gateway import Shape, run

    _report(run(_settings(config, model, None), Shape(streams, tokens, firsts, requests)), as_json, check)


def _settings(config: Path | None, model: str | None, dtype: str | None) -> ClusterConfig:
    return load(config, {"model.name": model, "worker.dtype": dtype})


def _compare(settings: ClusterConfig, workload: Workload, both: bool, as_json: bool, check: bool) -> None:
    from cluster.bench.sides import compare

    _report(compare(settings, workload, both), as_json, check)


def _report(report: Report, as_json: bool, check: bool) -> None:
    report.show(as_json)
    if check and not report.ok:
        raise typer.Exit(1)

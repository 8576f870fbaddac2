"""transformers as a peer: its own continuous batching, `generate_batch`, in this process."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from cluster.bench.peers.llama_cpp import PeerError
from workers.engine.model import resolve_device, resolve_dtype
from workers.kv.memory import DTYPES

PAGE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Transformers:
    """How it is run: `batch_tokens` tokens in a batch, None for its own default."""

    batch_tokens: int | None

    def output_tokens_per_s(
        self, path: Path, dtype: str, device: str, threads: int, prompts: list[list[int]], output: int
    ) -> float:
        """Throughput of all prompts at once. It shares blocks of common beginnings, but begins with an empty cache: one
        prompt more to compute than for servers that have seen the prefix. Raises PeerError."""
        torch.set_num_threads(threads)
        where = resolve_device(device)
        kind = DTYPES[resolve_dtype(dtype, where)]
        model = AutoModelForCausalLM.from_pretrained(path, dtype=kind, attn_implementation="sdpa").to(where).eval()
        generation = GenerationConfig(max_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0)
        start = time.perf_counter()
        answers = model.generate_batch(
            prompts, generation_config=generation, continuous_batching_config=self._batching(prompts, output)
        )
        seconds = time.perf_counter() - start
        tokens = sum(len(answer.generated_tokens) for answer in answers.values())
        if tokens != len(prompts) * output:
            raise PeerError(f"generate_batch made {tokens} tokens instead of {len(prompts) * output}")
        return tokens / seconds

    def _batching(self, prompts: list[list[int]], output: int) -> ContinuousBatchingConfig:
        # Just enough pages for all of them: by default it takes over half of the machine's memory, and minutes to fill
        # it.
        pages = sum(-(-(len(prompt) + output) // PAGE_TOKENS) + 1 for prompt in prompts)
        wanted = {} if self.batch_tokens is None else {"max_batch_tokens": self.batch_tokens}
        return ContinuousBatchingConfig(page_size=PAGE_TOKENS, num_blocks=pages, **wanted)

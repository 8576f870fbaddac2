"""Tiny random models of every supported kind, made at test time, and the reference they are compared with.

Weights are drawn wide, so that greedy text varies and its two best logits lie far apart (0.2 to 0.4 in the median,
float32 noise is 1e-5): a wrong position, mask or block then changes tokens instead of hiding in a repeated one.
Windows are 24 tokens. `clear_prompt` avoids the rare near-tie that noise alone could turn.
"""

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCABULARY = 512
CONTEXT = 2048
WINDOW = 24
EOS, BOS, PAD = 256, 257, 258  # after the 256 bytes

COMMON = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.15,  # the default 0.02 repeats one token; beyond 0.2 float noise grows faster than the gaps
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
}
ALTERNATING = {
    "sliding_window": WINDOW,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {  # queries and keys have 16 + 8 values a head, values have 20
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "original_max_position_embeddings": CONTEXT // 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaConfig(**COMMON),
    "qwen3": lambda: tf.Qwen3Config(**COMMON),
    "mistral": lambda: tf.MistralConfig(**COMMON | {"sliding_window": WINDOW}),
    "mixtral": lambda: tf.MixtralConfig(**COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(**COMMON | EXPERTS | {"num_experts": 8}),
    "gemma2": lambda: tf.Gemma2Config(
        **COMMON
        | ALTERNATING
        | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    ),
    "gemma3_text": lambda: tf.Gemma3TextConfig(**COMMON | ALTERNATING | {"query_pre_attn_scalar": 16}),
    "gpt_oss": lambda: tf.GptOssConfig(
        **COMMON | ALTERNATING | {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": YARN}
    ),
    "deepseek_v3": lambda: tf.DeepseekV3Config(**COMMON | EXPERTS | LATENT),
}
ARCHITECTURES: tuple[str, ...] = tuple(CONFIGS)

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def build(arch: str, path: Path) -> Path:
    """Save a float32 model of kind `arch` (of ARCHITECTURES) with a byte-level tokenizer in `path`, and return it."""
    torch.manual_seed(20260101)
    model = tf.AutoModelForCausalLM.from_config(CONFIGS[arch](), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(0.0, 2.0)
    model.generation_config = tf.GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
    model.save_pretrained(path)
    _tokenizer().save_pretrained(path)
    return path


def _tokenizer() -> Any:
    """One token a byte, three special ones, and names for the rest of the vocabulary so that every id decodes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|end|>", "<|begin|>", "<|pad|>"]
    words = [f"<{i}>" for i in range(len(alphabet) + len(special), VOCABULARY)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet + special + words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=special[0],
        bos_token=special[1],
        pad_token=special[2],
        chat_template=CHAT_TEMPLATE,
    )


def reference(path: Path, prompt_ids: list[int], n: int) -> list[int]:
    """Exactly `n` greedy token ids after `prompt_ids` by transformers alone: float32, eager, no stop token."""
    return _generate(path, prompt_ids, n)[0]


def clear_prompt(path: Path, length: int, n: int, seed: int = 0, gap: float = 1e-3) -> tuple[list[int], list[int]]:
    """A random prompt of `length` ids and its reference of `n` ids, whose two best logits never lie within `gap`."""
    draw = random.Random(seed)
    for _ in range(100):
        prompt = [draw.randrange(VOCABULARY) for _ in range(length)]
        ids, smallest_gap = _generate(path, prompt, n)
        if smallest_gap > gap:
            return prompt, ids
    raise ValueError(f"no prompt of {length} tokens with gaps over {gap}")


def _generate(path: Path, prompt_ids: list[int], n: int) -> tuple[list[int], float]:
    model = _load(path)
    prompt = torch.tensor([prompt_ids])
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=n)
    best = torch.cat(output.logits).topk(2).values
    return output.sequences[0, len(prompt_ids) :].tolist(), (best[:, 0] - best[:, 1]).min().item()


@functools.lru_cache(maxsize=2)
def _load(path: Path) -> Any:
    model = tf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    # In place of the model's own, which would add its stop token and, for some models, sampling.
    model.generation_config = tf.GenerationConfig(
        do_sample=False, eos_token_id=None, pad_token_id=PAD, return_dict_in_generate=True, output_logits=True
    )
    return model

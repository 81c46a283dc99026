"""Makes small random models of 12 layers for the tests of `hetlb stage`, and answers them with transformers.

Each family of `hetlb.tools.stage.checkpoint` with what sets it apart: Llama 3's rope scaling and tied
embeddings, Mistral's sliding window, Qwen 2's biases, Qwen 3's norms of queries and keys. All parameters are
random, norms and biases too, so that a wrong one changes the answer.

    .venv-vllm/bin/python tests/vllm/make_stage_models.py make FOLDER
    .venv-vllm/bin/python tests/vllm/make_stage_models.py answer N FOLDER/llama ... < PROMPTS > TOKENS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from make_models import BOS, EOS, MAX_POSITIONS, SEED, SPECIALS, VOCAB_SIZE, save_tokenizer

LAYERS = 12
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": SPECIALS.index(BOS),
    "eos_token_id": SPECIALS.index(EOS),
    "pad_token_id": SPECIALS.index(EOS),
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def models() -> dict[str, Any]:
    """Configurations by name."""
    from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

    linear = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    return {
        "llama": LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True),
        "llama-linear": LlamaConfig(
            **SHAPE, rope_parameters=linear, tie_word_embeddings=False, attention_bias=True, mlp_bias=True
        ),
        "mistral": MistralConfig(**SHAPE, sliding_window=24, head_dim=32, tie_word_embeddings=False),
        "qwen2": Qwen2Config(
            **SHAPE,
            use_sliding_window=True,
            sliding_window=20,
            max_window_layers=5,
            tie_word_embeddings=False,
        ),
        "qwen3": Qwen3Config(**SHAPE, head_dim=24, tie_word_embeddings=True),
    }


def make(root: Path) -> None:
    """Write every model that is not there yet."""
    import torch
    from transformers import AutoModelForCausalLM

    for name, config in models().items():
        folder = root / name
        if (folder / "tokenizer.json").exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for key, values in model.named_parameters():
                if "norm" in key:
                    values.uniform_(0.5, 1.5)
                else:
                    values.normal_(0.0, 0.2)
        model.save_pretrained(str(folder), max_shard_size="200KB")
        save_tokenizer(folder)


def answer(folders: list[Path], count: int) -> None:
    """Greedy tokens of the prompts on stdin by every model, to stdout."""
    import torch
    from transformers import AutoModelForCausalLM

    prompts = json.load(sys.stdin)
    found = []
    with torch.inference_mode():
        for folder in folders:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            found.append([tokens_of(model, prompt, count) for prompt in prompts])
    json.dump(found, sys.stdout)


def tokens_of(model: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of one prompt."""
    import torch

    tokens, past = torch.tensor([prompt]), None
    output: list[int] = []
    for _ in range(count):
        step = model(tokens, past_key_values=past, use_cache=True)
        past, tokens = step.past_key_values, step.logits[:, -1:].argmax(-1)
        output.append(int(tokens))
    return output


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
    else:
        answer([Path(each) for each in sys.argv[3:]], int(sys.argv[2]))

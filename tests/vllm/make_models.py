"""Makes the two tiny models that real vLLM serves in the tests, out of nothing.

Promises:
- needs no network and no weights from anywhere: a byte-level BPE tokenizer (vocabulary 2,048, with a
  chat template) and Llamas with random weights, all from fixed seeds. The same versions of torch,
  transformers and tokenizers give the same files.
- writes ``FOLDER/tiny-fast`` (hidden 256, 4 layers, about 5M parameters) and ``FOLDER/tiny-slow``
  (hidden 768, 12 layers, about 107M). Both speak the same tokenizer, so a token-id prompt means the same
  to both and a proxy may send any request to either.
- a model that is already there is left alone, and a half-written one is never taken for a whole one:
  each is written beside its place and renamed into it.

Run it with the environment that install.sh makes:
``.venv-vllm/bin/python tests/vllm/make_models.py FOLDER``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

VOCAB_SIZE = 2048
MAX_POSITIONS = 4096
SEED = 20261121
BOS, EOS = "<|begin|>", "<|end|>"
ROLE_START, ROLE_END = "<|start_of_role|>", "<|end_of_role|>"
ONSETS = "b br c ch d f g gr h l m n p pl r s st t th v w"
NUCLEI = "a e i o u ai ea ee ou y"
CODAS = "d l m n nd ng r s st t"
COMMON_WORDS = "the of and to in is that for it with a Hello Count Tell me story"
SPECIALS = [BOS, EOS, ROLE_START, ROLE_END]

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    f"{{{{ '{ROLE_START}' + message['role'] + '{ROLE_END}' }}}}"
    f"{{{{ message['content'] + '{EOS}' }}}}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{{{{ '{ROLE_START}assistant{ROLE_END}' }}}}{{% endif %}}"
)


@dataclass(frozen=True)
class Size:
    """What sets one model apart from the other."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int


SIZES = (
    Size("tiny-fast", hidden=256, layers=4, heads=4, kv_heads=4, intermediate=1024),
    Size("tiny-slow", hidden=768, layers=12, heads=12, kv_heads=12, intermediate=2752),
)


def corpus(rng: random.Random) -> Iterator[str]:
    """Pseudo-English from made-up syllables: enough variety that BPE finds its 2,048 pieces."""
    onset = ["", *ONSETS.split()]
    nucleus = NUCLEI.split()
    coda = ["", "", *CODAS.split()]
    words = COMMON_WORDS.split()
    for _ in range(3000):
        words.append("".join(rng.choice(p) for _ in range(rng.randint(1, 3)) for p in (onset, nucleus, coda)))
    weights = [1.0 / (rank + 3) for rank in range(len(words))]
    for _ in range(8000):
        line = " ".join(rng.choices(words, weights, k=rng.randint(5, 20)))
        yield f"{line}{rng.choice('.?!,:')} {rng.randint(0, 9999)}\n"


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    raw.train_from_iterator(corpus(random.Random(SEED)), trainer)
    if raw.get_vocab_size() != VOCAB_SIZE:
        raise SystemExit(f"the tokenizer came out with {raw.get_vocab_size()} pieces instead of {VOCAB_SIZE}")
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(str(folder))


def save_model(size: Size, folder: Path) -> int:
    """Write config and random weights; the number of parameters comes back."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=SPECIALS.index(BOS),
        eos_token_id=SPECIALS.index(EOS),
        pad_token_id=SPECIALS.index(EOS),
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(str(folder))
    return sum(p.numel() for p in model.parameters())


def make(size: Size, root: Path) -> None:
    final = root / size.name
    if (final / "config.json").is_file():
        print(f"{size.name}: already there", file=sys.stderr)
        return
    part = root / f".{size.name}.{os.getpid()}"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        save_tokenizer(part)
        count = save_model(size, part)
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    heads = json.loads((final / "config.json").read_text())
    kv_bytes = 2 * size.layers * size.kv_heads * (heads["hidden_size"] // size.heads) * 2
    print(f"{size.name}: {count / 1e6:.1f}M parameters, {kv_bytes} KV bytes a token", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the tiny models for the tests on real vLLM.")
    parser.add_argument("folder", type=Path, help="where to put tiny-fast/ and tiny-slow/")
    root: Path = parser.parse_args().folder
    root.mkdir(parents=True, exist_ok=True)
    for size in SIZES:
        make(size, root)


if __name__ == "__main__":
    main()

"""A model in integers, exact and without torch, over the real paged KV cache.

Every layer of every token depends on all tokens before it: a wrong block or position changes the answer.

Layer l makes x[i] into (7 x[i] + (l + 1) * (x[0] + ... + x[i]) + i) mod 997; its cache holds x.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from hetlb.tools.stage.batching import StageBlocks, Work
from hetlb.tools.stage.runner import Result, Sampled, choose
from hetlb.tools.stage.stage_messages import Sampling, Welcome
from hetlb.tools.stage.worker import StageWorker

PRIME = 997
LAYERS = 12
EOS = "<end>"


def make_folder(folder: Path) -> Path:
    """A model's folder: byte-level tokenizer, chat template, config; no weights."""
    folder.mkdir(exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({each: i for i, each in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    config = {
        "model_type": "llama", "num_hidden_layers": LAYERS, "hidden_size": 1, "intermediate_size": 1,
        "num_attention_heads": 1, "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 512,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


VOCABULARY = 257


def answer(prompt: Sequence[int], count: int, sampling: Sampling | None = None) -> list[int]:
    """The right tokens, computed from the whole context each time."""
    tokens = list(prompt)
    output: list[int] = []
    for _ in range(count):
        x = np.array(tokens, dtype=np.int64)
        for layer in range(LAYERS):
            x = (7 * x + (layer + 1) * np.cumsum(x) + np.arange(len(x))) % PRIME
        token = pick(int(x[-1]), sampling or Sampling(len(prompt)), output, len(tokens) - 1).token
        tokens.append(token)
        output.append(token)
    return output


def pick(value: int, sampling: Sampling, output: Sequence[int], position: int) -> Sampled:
    """The token for the last value of a row; never the one that ends an answer."""
    logits = ((np.arange(VOCABULARY - 1) * 31 + value) % (VOCABULARY - 1)).astype(np.float32) / 8.0
    return Sampled(*choose(np.append(logits, np.float32(-100.0)), sampling, output, position))


class ToyRunner:
    """Layers [first, end) of the model. `gate`, when it is cleared, holds batches up."""

    def __init__(self, first: int, end: int, blocks: int, block_size: int) -> None:
        self._first = first
        self._size = block_size
        self._cache = np.full(blocks * block_size, -1, dtype=np.int64)
        self.gate = threading.Event()
        self.gate.set()
        #: Fails every batch; a token that fails the batch that it enters in.
        self.broken = False
        self.poison: int | None = None
        self.batches = 0
        self.largest = 0

    row_bytes = 8

    def run(self, works: Sequence[Work]) -> list[Result]:
        self.gate.wait(30)
        if self.broken or any(self._poisoned(work) for work in works):
            raise RuntimeError("no memory")
        self.batches += 1
        self.largest = max(self.largest, len(works))
        return [self._run(work) for work in works]

    def _poisoned(self, work: Work) -> bool:
        rows = np.frombuffer(work.rows, dtype="<i4" if work.lease.table.first == 0 else "<i8")
        return self.poison is not None and work.lease.table.first == 0 and self.poison in rows

    def _run(self, work: Work) -> Result:
        lease, count, position = work.lease, work.count, work.position
        x = np.frombuffer(work.rows, dtype="<i4" if lease.table.first == 0 else "<i8").astype(np.int64)
        for layer in range(lease.table.first, lease.table.end):
            table = lease.table
            self._cache[table.slots(layer, layer + 1, position, count, self._size)[0]] = x
            seen = self._cache[table.slots(layer, layer + 1, 0, position + count, self._size)[0]]
            x = (
                7 * x + (layer + 1) * np.cumsum(seen)[position:] + np.arange(position, position + count)
            ) % PRIME
        if lease.next_url is not None:
            return x.astype("<i8").tobytes()
        if not work.samples:
            return b""
        return pick(int(x[-1]), lease.sampling, lease.output, position + count - 1)


def make_worker(
    folder: Path,
    first: int,
    end: int,
    *,
    token_layers: int = 100_000,
    block_size: int = 4,
    max_num_batched_tokens: int = 32,
    key: bytes = b"",
    **options: object,
) -> tuple[StageWorker, ToyRunner, StageBlocks]:
    """A worker of the toy model, not started."""
    from hetlb.tools.stage.checkpoint import load_config

    pool = StageBlocks(token_layers // block_size, block_size)
    runner = ToyRunner(first, end, pool.blocks, block_size)
    welcome = Welcome(
        model=load_config(folder).fingerprint,
        dtype="float32",
        first=first,
        end=end,
        kv_token_layers=pool.token_layers,
        max_num_seqs=16,
        max_num_batched_tokens=max_num_batched_tokens,
        prompt_times=[(0.0, 0.0), (100.0, 0.001)],
        decode_times=[(0.0, 0.0), (1.0, 0.0001), (16.0, 0.0002)],
    )
    return StageWorker(runner, pool, welcome, key=key, **options), runner, pool  # type: ignore[arg-type]

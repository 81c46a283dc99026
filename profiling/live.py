"""Profiles a fresh GPU machine that has no network: every model and degree that its time allows.

    python profiling/live.py pack KIT [--vllm VERSION]     # where there is a network
    python profiling/live.py run KIT --out OUT [--minutes 30]

`pack` fills the folder KIT with all that must be carried: wheels of hetlb and its dependencies, with `--vllm`
vLLM's too (about 5 GB; not needed where the machine has it), and folders of models. A model is its
config.json and a tokenizer made here: vLLM makes up the weights (`--load-format dummy`), since times do not
depend on their values. `run` makes a virtual environment from the wheels, starts vLLM for one model and
degree after the other, small degrees first, and runs `hetlb profile` against it. Each profile is in OUT as
soon as it is made; what does not start is skipped and its log kept; nothing is begun that the time left does
not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: Seconds until a server answers at most, and of its profile; what a profile takes besides.
START_S, PROFILE_S, FINISH_S = 300.0, 240.0, 20.0

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
#: Models that are packed: public facts of their config.json.
MODELS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "qwen2.5-14b": {
        **_LLAMA,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
    },
    "llama-3.1-70b": {
        **_LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """A model without weights: its config.json, and a tokenizer with a token for each of its ids."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    characters = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))]
    characters += [chr(256 + index) for index in range(256 - len(characters))]
    tokens = ["<s>", "</s>", *characters]
    tokens += [f"<t{index}>" for index in range(len(tokens), config["vocab_size"])]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": index, "content": token, "special": True, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False}
            for index, token in enumerate(tokens[:2])
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                          "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                  "vocab": {token: index for index, token in enumerate(tokens)}, "merges": []},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings) + "\n")


def pack(kit: Path, vllm: str | None, models: Sequence[str]) -> None:
    """Fill a folder with what `run` needs."""
    wheels = kit / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--wheel-dir", str(wheels), str(ROOT)], check=True)
    if vllm is not None:
        subprocess.run([*pip, "download", "--dest", str(wheels), f"vllm=={vllm}"], check=True)
    for name in models:
        write_model(kit / "models" / name, MODELS[name])
    shutil.copy(__file__, kit / "live.py")
    size = sum(file.stat().st_size for file in kit.rglob("*") if file.is_file())
    print(f"{kit}: {size / 1e6:,.0f} MB; on the machine: python {kit.name}/live.py run {kit.name} --out OUT")


# --- on the machine -------------------------------------------------------------------------------------


def environment(kit: Path, out: Path) -> Path:
    """The Python that has hetlb, and vLLM where it was packed or the machine has it."""
    if not list((kit / "wheels").glob("*.whl")):
        return Path(sys.executable)
    folder = out / "venv"
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", str(folder)], check=True)
        wheels = kit / "wheels"
        names = ["hetlb", *(["vllm"] if list(wheels.glob("vllm-*.whl")) else [])]
        offline = ["--no-index", "--find-links", str(wheels)]
        subprocess.run([str(python), "-m", "pip", "install", "-q", *offline, *names], check=True)
    return python


def gpus() -> tuple[str, int, int]:
    """Name, number and bytes of memory of the GPUs; one "cpu" where there is none."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    except (OSError, subprocess.CalledProcessError):
        return "cpu", 1, 0
    name, memory = (part.strip() for part in lines[0].split(","))
    return name.replace("NVIDIA ", "").replace(" ", "-").lower(), len(lines), int(memory) << 20


@contextmanager
def server(
    python: Path, model: Path, degree: int, log: Path, arguments: Sequence[str], within_s: float
) -> Iterator[str]:
    """A vLLM server that answers, ended with its whole process group. Raises `TimeoutError`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", model.name, "--load-format", "dummy", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--tensor-parallel-size", str(degree), *arguments]
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **offline}, process_group=0
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_ready(process, url, time.monotonic() + within_s)
            yield url
        finally:
            _end(process)


def _wait_ready(process: subprocess.Popen[bytes], url: str, deadline: float) -> None:
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise TimeoutError(f"vLLM ended with status {process.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2.0) as reply:
                if reply.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(1.0)
    raise TimeoutError("vLLM was not ready in time")


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=15.0)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    process.wait()


def run(kit: Path, out: Path, minutes: float, models: Sequence[str], arguments: Sequence[str]) -> int:
    """Profile every model at every degree; 0 if at least one profile was made."""
    end = time.monotonic() + 60.0 * minutes
    out.mkdir(parents=True, exist_ok=True)
    python, (gpu, count, memory) = environment(kit, out), gpus()
    degrees = [degree for degree in (1, 2, 4, 8) if degree <= count]
    done: list[dict[str, Any]] = []
    for name in models or sorted(path.name for path in (kit / "models").iterdir()):
        config = json.loads((kit / "models" / name / "config.json").read_text())
        for degree in degrees:
            left = end - time.monotonic()
            if config["num_attention_heads"] % degree or left < 120.0:
                continue
            label = f"{gpu}-{name}-tp{degree}"
            entry = {"profile": f"{label}.yaml", "ok": False, "seconds": 0.0, "error": ""}
            begun = time.monotonic()
            try:
                within_s = min(START_S, left - 60.0)
                log = out / f"{label}.log"
                with server(python, kit / "models" / name, degree, log, arguments, within_s) as url:
                    budget_s = min(PROFILE_S, end - time.monotonic() - FINISH_S)
                    command = [str(python), "-m", "hetlb", "profile", "--url", url, "--system", gpu]
                    command += ["--tp", str(degree), "--budget", f"{max(20.0, budget_s):.0f}s"]
                    facts = {"hardware": {"gpu": gpu, "memory_bytes": memory or None}, "model": {
                        "name": name, "config": str((kit / "models" / name / "config.json").resolve())
                    }}  # fmt: skip
                    (out / "facts.yaml").write_text(json.dumps(facts))
                    command += ["--facts", str(out / "facts.yaml")]
                    command += ["--out", str(out / f"{label}.yaml")]
                    subprocess.run(command, check=True, timeout=max(60.0, budget_s + 120.0))
                entry["ok"] = True
            except (TimeoutError, subprocess.SubprocessError) as error:
                entry["error"] = str(error)
            entry["seconds"] = time.monotonic() - begun
            done.append(entry)
            (out / "runs.json").write_text(json.dumps(done, indent=1) + "\n")
            print(
                f"{label}: {'made' if entry['ok'] else entry['error']} ({entry['seconds']:.0f} s)", flush=True
            )
    return 0 if any(entry["ok"] for entry in done) else 1


def main() -> int:
    """Pack or run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    packer = verbs.add_parser("pack", help="fill a folder with what must be carried")
    runner = verbs.add_parser("run", help="profile this machine")
    for each in (packer, runner):
        each.add_argument("kit", type=Path)
        each.add_argument("--models", default="", help="names, separated by commas")
    packer.add_argument("--vllm", metavar="VERSION", help="pack vLLM too")
    runner.add_argument("--out", type=Path, required=True)
    runner.add_argument("--minutes", type=float, default=30.0)
    runner.add_argument("vllm_arguments", nargs="*", help="after --: further arguments of the server")
    args = parser.parse_args()
    names = [name for name in args.models.split(",") if name]
    if args.verb == "pack":
        pack(args.kit, args.vllm, names or list(MODELS))
        return 0
    return run(args.kit, args.out, args.minutes, names, args.vllm_arguments)


if __name__ == "__main__":
    sys.exit(main())

"""Keys, values and flags of earlier versions, and what to use in their place: the whole list."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

#: About the shares of a plan.
_WORTH: Final = (
    "`hetlb rent --write-fleet` writes `policy.worth`, which `hetlb` follows, and `policy.types`, which"
    " `planned` holds"
)
#: By key path of a file, list positions left out.
GONE_KEYS: Final = {
    "policy.state_file": "lengths are learnt anew after a start: delete the key; `policy.trace` with"
    " `predictor: empirical` states lengths",
    "policy.shares": _WORTH,
    "models[].stages": "write its keys into a file of their own, with `version: 1` and `model: NAME`, start"
    " `hetlb stage --coordinate FILE --port N`, and name http://HOST:N under `instances`",
    "shared.lease": "all pickers serve: `shared.url` names the server through which they share one view",
}
#: By key path and value.
_CONNECTORS: Final = "use `nixl` or `mooncake`, connectors that vLLM keeps up"
GONE_VALUES: Final[dict[tuple[str, object], str]] = {
    ("models[].kv_transfer", "shared-storage"): _CONNECTORS,
    ("models[].kv_transfer.connector", "shared-storage"): _CONNECTORS,
}
_BLOCKS: Final = "it is read from the lengths; NAME=TOKENS in hash_ids states any other"
#: By command and flag, or flag and value.
GONE_FLAGS: Final[dict[tuple[str, str], str]] = {
    ("rent", "--budgets"): "run it once for each `budget_per_hour`",
    ("rent", "--plot"): "it drew the plans of `--budgets`, which was removed too",
    ("rent", "--hours"): "make a plan for each hour: `--replan PLAN.json` follows the one before",
    ("bench", "--html"): "use --plot PICTURE, and --json for the figures",
    ("engine", "--kv-transfer shared-storage"): _CONNECTORS,
    ("engine", "--kv-folder"): "it was for `shared-storage`, which was removed too",
    ("engine", "--kv-layers"): "all emulated engines hold the same layers",
    ("engine", "--iteration"): "engines read weights once per iteration; `hetlb simulate` has both rules",
    ("serve", "--connect"): "`hetlb doctor --config FLEET.yaml` asks every server",
    **{(command, "--token-env"): "set HETLB_ADMIN_TOKEN" for command in ("explain", "status", "top")},
    ("explain", "--theta"): "set `policy.theta` in the fleet file",
    ("demo", "--seed"): "every run sends the same trace",
    ("rent", "--gap"): "the solver stops at 1e-4, or after --time-limit",
    ("rent", "--cache"): "set XDG_CACHE_HOME to the folder of `hetlb/throughput.jsonl`",
    ("rent", "--no-baselines"): "--no-simulate skips the baselines too",
    ("rent", "--load-time"): "set `replanning.load_s` in the market file",
    ("rent", "--horizon"): "set `replanning.horizon_s` in the market file",
    ("rent", "--keep"): "set `replanning.keep` in the market file",
    ("stage", "--threads"): "set OMP_NUM_THREADS",
    ("stage", "--api-key-file"): "with --coordinate, --key-file names the clients' key",
    **{(command, "--hash-block-size"): _BLOCKS for command in ("simulate", "bench", "profile")},
    ("simulate", "--jobs"): "one process per core: `taskset --cpu-list 0-3 hetlb simulate` limits them",
    **{
        ("profile", flag): f"write `{key}` into a file and name it with --facts FILE"
        for flag, key in {
            "--name": "name: NAME",
            "--licence": "licence: TEXT",
            "--memory-bytes": "hardware: {gpu: NAME, memory_bytes: N}",
            "--kv-bytes-per-token": "model: {name: NAME, kv_bytes_per_token: N}",
            "--parameters": "model: {name: NAME, parameters: N}",
            "--model-config": "model: {name: NAME, config: FILE}",
            "--peak-flops": "roofline: {flops: N, bandwidth_bytes_per_s: N}",
            "--bandwidth": "roofline: {flops: N, bandwidth_bytes_per_s: N}",
            "--data-parallel": "engine: {data_parallel_size: N}",
            "--expert-parallel": "engine: {enable_expert_parallel: true}",
            "--async-scheduling": "engine: {async_scheduling: true}",
            "--no-async-scheduling": "engine: {async_scheduling: false}",
        }.items()
    },
    **{
        (
            "profile",
            f"--{key.replace('_', '-')}",
        ): f"write `engine: {{{key}: N}}` into a file and name it with --facts FILE"
        for key in (
            "kv_cache_tokens",
            "max_num_seqs",
            "block_size",
            "tokens_per_step",
            "max_num_batched_tokens",
        )
    },
    (
        "profile",
        "--overhead-ms",
    ): "write `host: {iteration_s: SECONDS}`, or `overhead_ms` under `roofline:`, into"
    " a file and name it with --facts FILE",
    ("profile", "--form"): "the form with the least held-out error is taken",
    ("profile", "--tile"): "it is read from the points",
    ("profile", "--scale"): "scale the times of a CSV, and use --from csv:FILE",
    ("profile", "--fresh"): "delete P.yaml.samples",
    ("profile", "--api-key-env"): "set OPENAI_API_KEY, as for `hetlb bench`",
    ("place", "--model-folder"): "fill the folder in where the printed commands and `folder:` name the model",
    ("stage", "--gpu-memory-utilization"): "use --kv-cache-memory-bytes",
    ("stage", "--gpu-type"): "--layer-times takes the rows of one gpu_type",
    ("search", "--slo"): "use --goodput ttft:500 tpot:50, as of `hetlb bench`",
    ("simulate", "--write"): "the weights are printed: `--tune FIGURE > weights.yaml`",
    ("bench", "--csv"): "use --save-result --result-filename FILE.csv",
    ("bench", "--slo-attainment"): "use --sweep SHARE",
    (
        "bench",
        "--prompt-salt",
    ): "prompts are new in every command; `--dataset-name custom` sends texts of a file",
}


#: About `resume: true`, at each of its keys.
RESUME_BY_TEXT: Final = "true was removed; use `ids`: an answer goes on by its token ids alone"


def gone_key(path: str) -> str | None:
    """Return the line about a key that went, None for other keys; `path` is as in `models[0].name`."""
    use = GONE_KEYS.get(_without_positions(path))
    return None if use is None else f"{path}: this key was removed; {use}"


def gone_value(path: str, value: Any) -> str | None:
    """Return the line about a value that went, None for other values."""
    try:
        use = GONE_VALUES.get((_without_positions(path), value))
    except TypeError:  # not hashable
        return None
    return None if use is None else f"{path}: {value!r} was removed; {use}"


def gone_flag(command: str, arguments: Sequence[str]) -> str | None:
    """Return the line about the first flag, or value of one, that was removed; None without one."""
    words = [word for argument in arguments for word in argument.split("=", 1)]
    for flag, value in zip(words, [*words[1:], ""], strict=True):
        for text in (flag, f"{flag} {value}"):
            if (use := GONE_FLAGS.get((command, text))) is not None:
                return f"{text}: was removed; {use}"
    return None


def _without_positions(path: str) -> str:
    return re.sub(r"\[\d+\]", "[]", path)

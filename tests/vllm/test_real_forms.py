"""Every form of server that planners emit starts on real vLLM (CPU), or is refused as their table says."""

from __future__ import annotations

import json
import os
import urllib.request
from dataclasses import replace
from pathlib import Path

import pair as real
import pytest
import split_pair
from engines import SERVED_MODEL_NAME, ServerFailed, ServerSpec, free_ports, vllm_servers
from split_pair import DECODER, READER

from hetlb.balancer.core.types import Role
from hetlb.tools.plan.common.capabilities import NIXL, Form, Status, fact_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

FORMS = (
    Form(pipeline_parallel_size=2),
    Form(tensor_parallel_size=2),
    Form(tensor_parallel_size=2, connector=NIXL, role=Role.PREFILL),
    Form(tensor_parallel_size=2, connector=NIXL, role=Role.DECODE),
    Form(pipeline_parallel_size=2, connector=NIXL, role=Role.PREFILL),
    Form(pipeline_parallel_size=2, connector=NIXL, role=Role.DECODE),
)


def named(form: Form) -> str:
    """The form in a word."""
    connector = "plain" if form.connector is None else f"nixl-{form.role.value}"
    return f"{connector}-tp{form.tensor_parallel_size}-pp{form.pipeline_parallel_size}"


def spec_of(form: Form, folder: Path) -> ServerSpec:
    """Return a server of two ranks, each on a core of its own where there are two."""
    spec = ServerSpec(named(form), "tiny-fast", core=0, max_num_seqs=4)
    if form.connector is not None:
        name = READER if form.role is Role.PREFILL else DECODER
        spec = split_pair.server_spec(name, "nixl", free_ports(1)[0], core=0)
    cores = sorted(os.sched_getaffinity(0))
    ranks = form.tensor_parallel_size * form.pipeline_parallel_size
    bound = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    arguments: tuple[str, ...] = (
        *("--tensor-parallel-size", str(form.tensor_parallel_size)),
        *("--pipeline-parallel-size", str(form.pipeline_parallel_size)),
    )
    layers: tuple[tuple[str, str], ...] = ()
    if form.pipeline_parallel_size == 2:
        # Without compilation the CPU build answers 500 where two ranks form a pipeline.
        arguments, layers = (*arguments, "--no-enforce-eager"), (("VLLM_PP_LAYER_PARTITION", "3,1"),)
    return replace(
        spec,
        extra_args=(*spec.extra_args, *arguments),
        extra_env=(*spec.extra_env, ("VLLM_CPU_OMP_THREADS_BIND", bound), *layers),
    )


@pytest.mark.parametrize("form", FORMS, ids=named)
def test_an_emitted_form_starts_and_answers(form: Form, tmp_path: Path) -> None:
    real.make_models()
    if form.connector is not None:
        split_pair.kv_wheels()
    spec = spec_of(form, tmp_path)
    if fact_of(form).status is Status.REFUSED:
        with (
            pytest.raises(ServerFailed, match="NotImplementedError"),
            vllm_servers([spec], real.MODELS, tmp_path, deadline_s=600.0),
        ):
            pass
        return
    with vllm_servers([spec], real.MODELS, tmp_path, deadline_s=600.0) as (server,):
        body = {"model": SERVED_MODEL_NAME, "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
        request = urllib.request.Request(
            f"{server.url}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4

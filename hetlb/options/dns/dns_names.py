"""Instances behind a DNS name: one for each address, or for each SRV record of the best priority.

A name that does not exist has no instances; a name server that does not answer changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from dns.exception import DNSException
from dns.resolver import NXDOMAIN, Resolver

from hetlb.balancer.config.fleet_tables import DnsTable
from hetlb.balancer.fleet.source import Found, Publish, SourceFailedError
from hetlb.inputs.urls import bracketed

#: Seconds that an answer may take.
_TIMEOUT_S = 2.0
#: Least seconds until a name is asked again, whatever its TTL.
_LEAST_TTL_S = 0.1


class DnsSource:
    """The servers of one name."""

    def __init__(self, table: DnsTable) -> None:
        self.name = f"dns {table.name}"
        self._table = table
        self._resolver = Resolver(configure=not table.servers)
        if table.servers:
            first = [
                server.rpartition(":") if server.count(":") == 1 else (server, "", "53")
                for server in table.servers
            ]
            self._resolver.nameservers = [host for host, _, _ in first]
            self._resolver.nameserver_ports = {host: int(port) for host, _, port in first}
        self._resolver.cache = None
        #: The servers of the last answer: a known server stays the same object.
        self._known: dict[tuple[str, float], Found] = {}
        self._resolver.lifetime = _TIMEOUT_S

    async def run(self, publish: Publish) -> None:
        while True:
            # Thousands of records take a tenth of a second to read.
            found, ttl_s = await asyncio.to_thread(self._ask)
            publish(found)
            await asyncio.sleep(max(_LEAST_TTL_S, min(ttl_s, self._table.interval_s)))

    def _ask(self) -> tuple[list[Found], float]:
        """Return the servers there are now, and for how many seconds the answer holds."""
        table = self._table
        if table.type == "SRV":
            records, ttl_s = self._records("SRV")
            best = min((record.priority for record in records), default=0)
            pairs = [
                (f"{str(record.target).rstrip('.')}:{record.port}", max(1, record.weight))
                for record in records
                if record.priority == best
            ]
        else:
            records, ttl_s = self._records("A")
            if not records:
                records, ttl_s = self._records("AAAA")
            pairs = [(f"{bracketed(str(record.address))}:{table.port}", 1) for record in records]
        known = self._known
        self._known = {
            pair: known.get(pair)
            or Found(
                name=pair[0],
                url=f"{table.scheme}://{pair[0]}",
                model=table.model or "",
                labels=table.labels,
                weight=pair[1],
            )
            for pair in sorted(pairs)
        }
        return list(self._known.values()), ttl_s

    def _records(self, kind: str) -> tuple[Sequence, float]:  # type: ignore[type-arg]
        try:
            answer = self._resolver.resolve(self._table.name, kind, raise_on_no_answer=False, search=True)
        except NXDOMAIN:
            return [], self._table.interval_s
        except DNSException as error:
            raise SourceFailedError(f"no answer: {' '.join(str(error).split())[:200]}") from error
        if answer.rrset is None:
            return [], self._table.interval_s
        return list(answer.rrset), float(answer.rrset.ttl)

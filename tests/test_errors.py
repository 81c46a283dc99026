"""Words for a host that was not reached."""

from __future__ import annotations

import errno
import socket

from hetlb.errors import reason_of


def test_a_refused_connection_has_the_words_of_the_system() -> None:
    error = ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('127.0.0.1', 1)")
    assert reason_of(error) == "Connection refused"


def test_a_name_without_an_address_keeps_the_words_of_the_resolver() -> None:
    error = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    assert reason_of(error) == "Name or service not known"


def test_an_error_without_a_number_says_what_it_has() -> None:
    assert reason_of(OSError("the tunnel is closed")) == "the tunnel is closed"

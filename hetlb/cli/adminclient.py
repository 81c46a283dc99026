"""Client of a running proxy's admin listener: documents and the event stream."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator
from typing import Any

from hetlb.errors import InputError
from hetlb.inputs.urls import check_base

#: Default address of `hetlb serve`'s admin listener.
DEFAULT_URL = "http://127.0.0.1:8081"
TOKEN_VARIABLE = "HETLB_ADMIN_TOKEN"
#: Seconds without data, and in all, that an answer may take.
TIMEOUT_S = 10.0
#: Seconds without data after which the event stream, which sends once a second, is dead.
SILENCE_S = 5.0
MOST_EVENT_BYTES = 16 << 20
MOST_ANSWER_BYTES = 64 << 20
_READ_BYTES = 64 << 10
_MOST_ERROR_BYTES = 64 << 10


class NoAnswerError(InputError):
    """Connection refused or broken; a retry may succeed. `why` is the reason alone."""

    def __init__(self, text: str, why: str) -> None:
        super().__init__(text)
        self.why = why


def add_admin_argument(parser: Any) -> None:
    """Add the flag of the proxy's address (`--url` is the former name)."""
    address = f"admin address of the proxy (default {DEFAULT_URL}); its token: ${TOKEN_VARIABLE}"
    parser.add_argument("--admin", "--url", metavar="URL", help=address)


class AdminClient:
    """Admin listener of one proxy; its token is never printed and goes to that address alone."""

    def __init__(self, text: str | None) -> None:
        """`text` is the value of `--admin`. Raises `InputError`."""
        self.url = check_base(text or DEFAULT_URL, "--admin", DEFAULT_URL)
        self._is_stated = bool(text)
        self._token = os.environ.get(TOKEN_VARIABLE, "").strip()
        if not self._token.isascii() or not self._token.isprintable():
            raise InputError(
                f"{TOKEN_VARIABLE}: expected an admin token of printable ASCII, got something else"
            )

    def document(self, path: str, *keys: str) -> dict[str, Any]:
        """Return the JSON object at a path, with at least these keys. Raises `InputError`."""
        return self._asked(urllib.request.Request(self.url + path), keys)

    def change(self, method: str, path: str, body: object) -> dict[str, Any]:
        """Send a change as JSON; return the JSON object of the response. Raises `InputError`."""
        data = json.dumps(body).encode()
        return self._asked(urllib.request.Request(self.url + path, data, method=method))

    def _asked(self, request: urllib.request.Request, keys: Collection[str] = ()) -> dict[str, Any]:
        with self._open(request, TIMEOUT_S) as reply:
            try:
                body = _whole(reply)
            except (OSError, ValueError, http.client.HTTPException) as error:
                raise self._no_answer(error) from error
        try:
            found = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise InputError(self._no_proxy("it does not answer in JSON")) from error
        if not isinstance(found, dict) or not found.keys() >= {*keys}:
            raise InputError(self._no_proxy(f"its answer holds no {' and '.join(keys)}"))
        return found

    def snapshots(self) -> Iterator[dict[str, Any]]:
        """Yield snapshots from the event stream. Raises `NoAnswerError` at its end, else `InputError`."""
        with self._open(urllib.request.Request(f"{self.url}/v1/events"), SILENCE_S) as reply:
            if reply.headers.get_content_type() != "text/event-stream":
                raise InputError(self._no_proxy("it has no event stream"))
            try:
                while line := reply.readline(MOST_EVENT_BYTES):
                    if line.startswith(b"data: "):
                        yield json.loads(line[6:])
            except (OSError, ValueError, http.client.HTTPException) as error:
                raise self._no_answer(error) from error
        raise self._no_answer(OSError("the proxy closed the connection"))

    def _open(self, request: urllib.request.Request, timeout_s: float) -> http.client.HTTPResponse:
        """Return the response to a request; the token is not sent to redirect targets."""
        if self._token:
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        try:
            reply: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            if (refusal := _refusal(error)) is not None:
                raise InputError(refusal) from error
            if error.code == 401:
                raise InputError(
                    f"--admin: {self.url}: 401 Unauthorized: expected the admin token in {TOKEN_VARIABLE}"
                ) from error
            where = "; the clients' port has no admin pages" if error.code in (404, 405) else ""
            raise InputError(
                self._no_proxy(f"status {error.code} {error.reason or ''}".rstrip() + where)
            ) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self._no_answer(error) from error
        return reply

    def _no_answer(self, error: Exception) -> NoAnswerError:
        cause = getattr(error, "reason", None) or error
        why = str(cause)
        if isinstance(cause, OSError) and not isinstance(cause, TimeoutError):
            from hetlb.balancer.engines.engine_mistakes import no_answer_at

            why = no_answer_at(cause)
        if self._is_stated:
            return NoAnswerError(self._no_proxy(why), why)
        advice = "start it with `hetlb serve`, or name its admin address with --admin"
        return NoAnswerError(f"expected a running proxy at {self.url!r}: {why}; {advice}", why)

    def _no_proxy(self, why: object) -> str:
        return f"--admin: expected the admin address of a running proxy, got {self.url!r}: {why}"


def _whole(reply: http.client.HTTPResponse) -> bytes:
    """Return the body of a response. Raises `OSError` if it is too large or takes too long."""
    body, until = bytearray(), time.monotonic() + TIMEOUT_S
    while piece := reply.read1(_READ_BYTES):
        body += piece
        if len(body) > MOST_ANSWER_BYTES:
            raise OSError(f"its answer is larger than {MOST_ANSWER_BYTES >> 20} MiB")
        if time.monotonic() > until:
            raise TimeoutError("timed out")
    if reply.length:
        raise http.client.IncompleteRead(bytes(body), reply.length)
    return bytes(body)


def _refusal(error: urllib.error.HTTPError) -> str | None:
    """Return the message of an error of a proxy's admin listener, None for the response of another server.

    The clients' port answers in the same form, with `param` and a text as `code`.
    """
    try:
        found = json.loads(error.read(_MOST_ERROR_BYTES))["error"]
        admins = error.code != 401 and found["code"] == error.code and "param" not in found
        return str(found["message"]) if admins else None
    except (KeyError, OSError, RecursionError, TypeError, ValueError, http.client.HTTPException):
        return None

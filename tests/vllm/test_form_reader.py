"""The gate against Starlette's reader of forms, which is vLLM's: what both take they read alike."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from engines import VENV_PYTHON
from forks import answered
from fuzz.run_target import mutate
from proxy.test_multipart import BY_CLIENT

from hetlb.balancer.http.http1 import GateError
from hetlb.balancer.http.multipart import read_form
from hetlb.balancer.http.openai_body import Call

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
FORMS = 6000
TRUE = ("true", "1", "t", "yes", "y", "on")
NAMES = (
    "model",
    "model",
    "stream",
    "file",
    "language",
    "vllm_xargs",
    "prompt",
    "Model",
    "timestamp_granularities[]",
)
VALUES = (
    b"whisper",
    b"m\xc3\xbc",
    b"true",
    b"",
    b"a\r\nb",
    b"--b",
    b"\r\n",
    b"0.0",
    b" m ",
    b"{}",
    b"\xff",
    b"True",
)
#: Spellings of one part, by the name and where it is a file.
HEADS = (
    'Content-Disposition: form-data; name="{name}"', "Content-Disposition: form-data; name={name}",
    "content-disposition: form-data; name={name}", "Content-Disposition:form-data;name=\"{name}\"",
    "CONTENT-DISPOSITION: Form-Data; NAME=\"{name}\"", 'Content-Disposition: form-data ; name="{name}"',
    "Content-Disposition: form-data; name='{name}'", 'Content-Disposition: form-data; name = "{name}"',
    "Content-Disposition: form-data; name*=utf-8''{name}", 'Content-Disposition: form-data; name="{name}";',
    'Content-Disposition: attachment; name="{name}"', 'Content-Disposition: form-data; x=y; name="{name}"',
    'Content-Disposition: form-data; name="{name}"; filename="a.wav"',
    "Content-Disposition: form-data; name={name}; filename=a.wav; filename*=utf-8''a.wav",
    "Content-Disposition: form-data; name=\"{name}\"; filename*=utf-8''M%C3%BCller.wav",
    'Content-Disposition: form-data; filename="a; b.wav"; name="{name}"',
    'Content-Disposition: form-data; name="{name}"; filename=""',
    'Content-Disposition: form-data; name="{name}"; filename="C:\\a.wav"',
    'Content-Disposition: form-data; name="{name}"; filename="a \\"b\\".wav"',
    'Content-Disposition: form-data; name="{name}"; filename="=?utf-8?q?a?="',
    'Content-Disposition: form-data; name="{name}"; filename="\u00fc.wav"; size=4',
)  # fmt: skip
MORE = (
    "Content-Type: audio/wav", "Content-Type: text/plain; charset=utf-8", "Content-Length: 4",
    "Content-Transfer-Encoding: binary", "Content-Transfer-Encoding: 8bit", "MIME-Version: 1.0", "X-A: b",
    "X-A:", "Content-ID: <a>", "Content-Type: application/json",
)  # fmt: skip


def drawn(rng: random.Random) -> tuple[bytes, bytes]:
    """Return the content type and the body of a form."""
    boundary = rng.choice(["b", "----WebKitFormBoundaryab12", "a'()+_,-./:=?", "x" * 70, "=_1"])
    quoted = f'"{boundary}"' if rng.random() < 0.4 or not boundary.isalnum() else boundary
    kind = rng.choice(
        [
            "multipart/form-data; boundary=",
            "Multipart/Form-Data;boundary=",
            "multipart/form-data; charset=utf-8; boundary=",
        ]
    )
    body = rng.choice([b"", b"", b"\r\n", b"preamble\r\n"])
    for _ in range(rng.randint(1, 5)):
        head = rng.choice(HEADS).format(name=rng.choice(NAMES))
        lines = [head, *rng.sample(MORE, rng.choice([0, 0, 1, 2]))]
        rng.shuffle(lines)
        body += (
            f"--{boundary}\r\n".encode()
            + "\r\n".join(lines).encode()
            + b"\r\n\r\n"
            + rng.choice(VALUES)
            + b"\r\n"
        )
    body += f"--{boundary}--".encode() + rng.choice([b"", b"\r\n", b"\r\n", b"\r\nepilogue", b"--"])
    return (kind + quoted).encode(), body


@pytest.fixture(scope="module")
def forms() -> list[tuple[bytes, bytes, Any]]:
    """Forms, and what Starlette takes from each."""
    if not VENV_PYTHON.is_file():
        pytest.skip("there is no .venv-vllm: run tests/vllm/install.sh first")
    rng = random.Random(3)
    made = [*BY_CLIENT.values(), *(drawn(rng) for _ in range(FORMS))]
    bodies = [body for _, body in made]
    made += [(kind, mutate(rng, body, bodies)) for kind, body in rng.choices(made, k=FORMS)]
    lines = "".join(
        json.dumps([kind.decode("latin-1"), body.decode("latin-1")]) + "\n" for kind, body in made
    )
    read = [json.loads(line) for line in answered("read_forms.py", question=lines).splitlines()]
    return [(kind, body, each) for (kind, body), each in zip(made, read, strict=True)]


def called(kind: bytes, body: bytes) -> Call | None:
    try:
        return read_form(kind, body)
    except GateError:
        return None


def test_what_both_take_they_read_alike(forms: list[tuple[bytes, bytes, Any]]) -> None:
    both = 0
    for kind, body, read in forms:
        call = called(kind, body)
        if call is None or read is None:
            continue
        both += 1
        models = [value for name, value in read if name == "model"]
        assert models in ([], [call.model]), (kind, body, read, call.model)
        streams = [value for name, value in read if name == "stream"]
        said = bool(streams) and (streams[-1] or "").lower() in TRUE
        assert call.stream == said, (kind, body, read)
    assert both > FORMS / 4


def test_forms_of_clients_are_taken(forms: list[tuple[bytes, bytes, Any]]) -> None:
    for kind, body, read in forms[: len(BY_CLIENT)]:
        assert read is not None
        assert called(kind, body) is not None, body


def test_a_form_is_refused_only_where_readers_differ(forms: list[tuple[bytes, bytes, Any]]) -> None:
    for kind, body, read in forms[: len(BY_CLIENT) + FORMS]:
        if read is None or called(kind, body) is not None or b"attachment" in body:
            continue
        with pytest.raises(GateError) as refused:
            read_form(kind, body)
        assert refused.value.message.startswith(
            # A value that begins with the boundary, a file or several of a name, no object.
            ("A part of the multipart body is malformed", "model: ", "stream: ", "vllm_xargs: ")
        ), (kind, body, refused.value.message)

"""Forms: which model they ask for, and what is refused."""

from __future__ import annotations

import email

import pytest
from hypothesis import given
from hypothesis import strategies as st
from python_multipart.multipart import parse_options_header

from hetlb.balancer.clients.model_names import rename_in_form
from hetlb.balancer.http.http1 import GateError
from hetlb.balancer.http.multipart import _named, read_form


def test_the_model_of_a_form() -> None:
    form = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nname="model"\r\n'
        b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n'
        b'--b\r\nContent-Disposition: form-data; name="stream"\r\n\r\ntrue\r\n--b--\r\n'
    )
    for kind in (b"boundary=b", b'Boundary="b"', b"charset=UTF-8; boundary=b"):
        call = read_form(b"multipart/form-data; " + kind, form)
        assert (call.model, call.stream) == ("whisper", True)
    assert read_form(b"multipart/form-data; boundary=b", b"--b--\r\n").model is None


@pytest.mark.parametrize(
    "kind",
    [
        b"", b"; boundary=", b"; boundary=b; boundary=c", b"; x-boundary=a; boundary=b", b"; boundary*=b",
        b'; boundary="b', b'; boundary="b\\"', b"; boundary=b; charset=utf-7",
        b"; boundary=b; charset*=utf-8", b"; boundary=b; charset=utf-8; charset=cp037",
    ],
)  # fmt: skip
def test_forms_of_which_the_end_or_the_text_is_doubtful(kind: bytes) -> None:
    form = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--b--\r\n'
    with pytest.raises(GateError):
        read_form(b"multipart/form-data" + kind, form)


DOTNET = (
    b"--5f0e0f7c-2c4e-4d1f-9a59-c7b0a6f2c1d3\r\nContent-Type: text/plain; charset=utf-8\r\n"
    b"Content-Disposition: form-data; name=model\r\n\r\nwhisper\r\n"
    b"--5f0e0f7c-2c4e-4d1f-9a59-c7b0a6f2c1d3\r\nContent-Type: text/plain; charset=utf-8\r\n"
    b"Content-Disposition: form-data; name=stream\r\n\r\nTrue\r\n"
    b"--5f0e0f7c-2c4e-4d1f-9a59-c7b0a6f2c1d3\r\n"
    b"Content-Disposition: form-data; name=file; filename=a.wav; filename*=utf-8''a.wav\r\n\r\nRIFF\r\n"
    b"--5f0e0f7c-2c4e-4d1f-9a59-c7b0a6f2c1d3--\r\n"
)
UNDICI = (
    b"------formdata-undici-078512345678\r\n"
    b'Content-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n'
    b'------formdata-undici-078512345678\r\nContent-Disposition: form-data; name="stream"\r\n\r\ntrue\r\n'
    b"------formdata-undici-078512345678\r\n"
    b'Content-Disposition: form-data; name="file"; filename="a %22.wav"\r\n'
    b"Content-Type: audio/wav\r\n\r\nRIFF\r\n------formdata-undici-078512345678--\r\n"
)
GO = (
    b'--b0a1\r\nContent-Disposition: form-data; name="file"; filename="a \\"b\\" \\\\.wav"\r\n'
    b"Content-Type: application/octet-stream\r\n\r\nRIFF\r\n"
    b'--b0a1\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n'
    b'--b0a1\r\nContent-Disposition: form-data; name="stream"\r\n\r\n1\r\n--b0a1--\r\n'
)
REQUESTS = (
    b'--c2\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n'
    b'--c2\r\nContent-Disposition: form-data; name="stream"\r\n\r\nyes\r\n'
    b"--c2\r\nContent-Disposition: form-data; name=\"file\"; filename*=utf-8''M%C3%BCller.wav\r\n\r\nRIFF\r\n"
    b"--c2--\r\n"
)
CURL = (
    b"--------------------------d74496d66958873e\r\n"
    b'Content-Disposition: form-data; name="file"; filename="C:\\a.wav"\r\n'
    b"Content-Type: audio/wav\r\n\r\nRIFF"
    b"\r\n--------------------------d74496d66958873e\r\n"
    b'Content-Disposition: form-data; name="model"\r\n\r\nwhisper'
    b"\r\n--------------------------d74496d66958873e\r\n"
    b'Content-Disposition: form-data; name="stream"\r\n\r\ntrue'
    b"\r\n--------------------------d74496d66958873e--\r\n"
)
BY_CLIENT = {
    "dotnet": (b'multipart/form-data; boundary="5f0e0f7c-2c4e-4d1f-9a59-c7b0a6f2c1d3"', DOTNET),
    "undici": (b"multipart/form-data; boundary=----formdata-undici-078512345678", UNDICI),
    "go": (b"multipart/form-data; boundary=b0a1", GO),
    "requests": (b"multipart/form-data; boundary=c2", REQUESTS),
    "curl": (b"multipart/form-data; boundary=------------------------d74496d66958873e", CURL),
    "with-a-line-before": (b"multipart/form-data; boundary=c2", b"\r\n" + REQUESTS),
    "chrome": (
        b"multipart/form-data; boundary=----WebKitFormBoundary7MA4YWxkTrZu0gW",
        UNDICI.replace(b"----formdata-undici-078512345678", b"----WebKitFormBoundary7MA4YWxkTrZu0gW"),
    ),
    "with-a-size": (
        b"multipart/form-data; boundary=c2;", REQUESTS.replace(b"; filename*", b"; size=4; filename*")
    ),
    "with-blanks": (
        b"multipart/form-data; boundary=c2", REQUESTS.replace(b'name="model"', b'name = "model" ;')
    ),
    "file-name-first": (
        b"multipart/form-data; boundary=b0a1", GO.replace(b'name="file"; filename="a', b'filename="a')
        .replace(b'.wav"', b'.wav"; name="file"'),
    ),
}  # fmt: skip


@pytest.mark.parametrize("client", BY_CLIENT)
def test_forms_as_clients_write_them(client: str) -> None:
    kind, form = BY_CLIENT[client]
    call = read_form(kind, form)
    assert (call.model, call.stream) == ("whisper", True)
    renamed = rename_in_form(form, call.model_at, "whisper", "large")
    assert renamed == form.replace(b"\r\n\r\nwhisper", b"\r\n\r\nlarge")
    assert read_form(kind, renamed).model == "large"


PIECES = st.sampled_from(
    [b"; ", b";", b" ; ", b"name", b"Name", b"filename", b"filename*", b"=", b'"', b"model", b"file", b"m ",
     b"\\", b'\\"', b"utf-8''a", b"%22", b" ", b"\t", b"\xc3\xbc", b",", b"x"]
)  # fmt: skip


@given(
    st.lists(PIECES, max_size=14),
    st.sampled_from([b"; name=model", b'; name="model"', b"", b'; filename="a"']),
)
def test_a_part_that_passes_has_one_reading(pieces: list[bytes], before: bytes) -> None:
    """python-multipart is vLLM's reader; `email` is the one of others, to which an escape is none."""
    line = b"Content-Disposition: form-data" + before + b"".join(pieces)
    found = _named(line)
    if found is None:
        return
    name, is_file = found
    _, options = parse_options_header(line.partition(b": ")[2])
    assert options[b"name"] == name
    assert is_file or b"filename" not in options
    if b"\\" not in line:
        read = email.message_from_bytes(line + b"\r\n\r\n")
        assert (
            str(read.get_param("name", header="content-disposition")).encode("ascii", "surrogateescape")
            == name
        )


NAMED = b'Content-Disposition: form-data; name="'


@pytest.mark.parametrize(
    "part",
    [
        b"Content-Disposition: form-data; name=model\r\n\r\nx",
        b"Content-Disposition: form-data; name*=utf-8''mo%64el\r\n\r\nx",
        NAMED + b'file"; filename="a"; name="model"\r\n\r\nx',
        NAMED + b'file"; filename="a\\"; name="model"\r\n\r\nx',
        NAMED + b'mo\\del"\r\n\r\nx',
        NAMED + b'model"; filename="a"\r\n\r\nx',
        NAMED + b'stream"; filename="a"\r\n\r\ntrue',
        NAMED + b"stream\"; filename*=utf-8''a\r\n\r\ntrue",
        NAMED + b'stream"\r\n\r\ntrue\r\n--b\r\n' + NAMED + b'stream"\r\n\r\nfalse',
        NAMED + b'file"; x-name=model\r\n\r\nx',
        NAMED + b'file"\r\n' + NAMED + b'model"\r\n\r\nx',
        NAMED + b'file"\r\n ; name="model"\r\n\r\nx',
        NAMED + b'file"\nContent-Disposition: form-data; name="model"\r\n\r\nx',
        b"Content-Type: text/plain\n" + NAMED + b'model"\r\n\r\nx',
        b'Content-Disposition : form-data; name="model"\r\n\r\nx',
        b"Content-Type: text/plain\r\n\r\nx",
        b"\r\n\r\nx",
        NAMED + b'model"\r\nx',
        NAMED + b'model"\r\n\r\n' + b"x" * 600,
        NAMED + b'model"\r\n\r\nx\r\n--bb\r\n',
        NAMED + b'model"\r\n\r\nx\r\n--b \r\n',
    ],
)
def test_parts_that_an_engine_may_read_in_another_way(part: bytes) -> None:
    form = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--b\r\n'
    with pytest.raises(GateError):
        read_form(b"multipart/form-data; boundary=b", form + part + b"\r\n--b--\r\n")


@pytest.mark.parametrize("length", range(3, 82))
def test_a_form_cut_anywhere(length: int) -> None:
    form = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper-large-v3\r\n--b--\r\n'
    with pytest.raises(GateError):
        read_form(b"multipart/form-data; boundary=b", form[:-length])


def test_a_boundary_inside_a_file_is_none() -> None:
    form = (
        b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"; filename*=utf-8\'\'a\r\n'
        b"Content-Type: audio/wav\r\n\r\n"
        b'%b--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nother\n--b--\r\n--b--\r\n'
    )
    assert read_form(b"multipart/form-data; boundary=b", form % b"x").model == "m"
    with pytest.raises(GateError):
        read_form(b"multipart/form-data; boundary=b", form % b"")


def test_of_a_long_value_little_is_read() -> None:
    form = b"--b\r\n" + NAMED + b'model"\r\n\r\nm\r\n--b\r\n' + NAMED + b'file"; filename="a"\r\n\r\n'
    call = read_form(b"multipart/form-data; boundary=b", form + b"\r\n-" * 100_000 + b"\r\n--b--\r\n")
    assert (call.model, call.stream) == ("m", False)
    with pytest.raises(GateError, match="one name in UTF-8 of at most 512 bytes"):
        read_form(
            b"multipart/form-data; boundary=b", form.replace(b"m\r\n--b", b"m" * 100_000 + b"\r\n--b", 1)
        )

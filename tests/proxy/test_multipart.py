"""Forms: which model they ask for, and what is refused."""

from __future__ import annotations

import pytest

from hetlb.proxy.http.http1 import GateError
from hetlb.proxy.http.multipart import read_form


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
    with pytest.raises(GateError, match="one name of at most 512 bytes"):
        read_form(
            b"multipart/form-data; boundary=b", form.replace(b"m\r\n--b", b"m" * 100_000 + b"\r\n--b", 1)
        )

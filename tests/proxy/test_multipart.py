"""Forms: which model they ask for, and what is refused, however their bytes are cut into reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetlb.proxy.http.http1 import GateError
from hetlb.proxy.http.multipart import FormReader
from hetlb.proxy.http.openai_body import Call


def read_multipart(content_type: bytes, body: bytes) -> Call:
    """A whole form."""
    reader = FormReader(content_type)
    reader.feed(body)
    return reader.finish()


def test_the_model_of_a_form() -> None:
    form = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nname="model"\r\n'
        b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n'
        b'--b\r\nContent-Disposition: form-data; name="stream"\r\n\r\ntrue\r\n--b--\r\n'
    )
    for kind in (b"boundary=b", b'Boundary="b"', b"charset=UTF-8; boundary=b"):
        call = read_multipart(b"multipart/form-data; " + kind, form)
        assert (call.model, call.stream) == ("whisper", True)
    assert read_multipart(b"multipart/form-data; boundary=b", b"--b--\r\n").model is None


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
        read_multipart(b"multipart/form-data" + kind, form)


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
        read_multipart(b"multipart/form-data; boundary=b", form + part + b"\r\n--b--\r\n")


@pytest.mark.parametrize("length", range(3, 82))
def test_a_form_cut_anywhere(length: int) -> None:
    form = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper-large-v3\r\n--b--\r\n'
    with pytest.raises(GateError):
        read_multipart(b"multipart/form-data; boundary=b", form[:-length])


def test_a_boundary_inside_a_file_is_none() -> None:
    form = (
        b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"; filename*=utf-8\'\'a\r\n'
        b"Content-Type: audio/wav\r\n\r\n"
        b'%b--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nother\n--b--\r\n--b--\r\n'
    )
    assert read_multipart(b"multipart/form-data; boundary=b", form % b"x").model == "m"
    with pytest.raises(GateError):
        read_multipart(b"multipart/form-data; boundary=b", form % b"")


PIECES = st.sampled_from(
    [
        b"--b", b"\r\n--b", b"--", b"\r\n", b"\r\n\r\n", b"x", b"--b--", b"m" * 600, b"true", b"\r", b"-",
        NAMED + b'model"', NAMED + b'stream"', NAMED + b'file"; filename="a"', b"Content-Type: audio/wav",
        b"\r\n" + NAMED + b'model"\r\n\r\nm\r\n--b', b"\r\n" + NAMED + b'file"; filename="a"\r\n\r\n',
        b"y" * 5000,
    ]
)  # fmt: skip


def _read(form: bytes, cuts: list[int]) -> tuple[str | None, bool] | tuple[int, str]:
    reader = FormReader(b"multipart/form-data; boundary=b")
    ends = sorted({cut % (len(form) + 1) for cut in cuts} | {len(form)})
    try:
        for start, end in zip([0, *ends], ends, strict=False):
            reader.feed(form[start:end])
        call = reader.finish()
    except GateError as error:
        return error.status, error.message
    return call.model, call.stream


@given(st.lists(PIECES, max_size=12), st.lists(st.integers(0, 20_000), max_size=8), st.booleans())
def test_where_reads_are_cut_says_nothing(pieces: list[bytes], cuts: list[int], begun: bool) -> None:
    form = (b"--b" if begun else b"") + b"".join(pieces)
    whole = _read(form, [])
    assert _read(form, cuts) == whole
    if len(form) < 2000:
        assert _read(form, list(range(len(form)))) == whole


def test_a_reader_keeps_little_of_what_it_read() -> None:
    reader = FormReader(b"multipart/form-data; boundary=b")
    reader.feed(b"--b\r\n" + NAMED + b'model"\r\n\r\nm\r\n--b\r\n' + NAMED + b'file"; filename="a"\r\n\r\n')
    assert reader.call.model == "m"
    for _ in range(64):
        reader.feed(b"\r\n-" * 10_000)
    assert len(reader._rest) + len(reader._value) < 1000
    reader.feed(b"\r\n--b--\r\n")
    assert reader.finish().model == "m"

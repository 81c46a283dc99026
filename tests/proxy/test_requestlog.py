"""Lines are written in order by a thread; a reader that is slow or gone costs lines, never the event loop."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetlb.proxy.requestlog import LineWriter, escape


async def test_lines_arrive_whole_and_in_order() -> None:
    reading, writing = os.pipe()
    writer = LineWriter(writing, "test")
    for number in range(500):
        writer.write(f"line={number}\n")
    writer.close()
    os.close(writing)
    with os.fdopen(reading) as lines:
        assert lines.read().split() == [f"line={number}" for number in range(500)]
    assert writer.lost == 0


async def test_a_reader_that_is_gone_costs_lines_only() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    writer = LineWriter(writing, "test")
    writer.write("a\n")
    writer.write("b\n")
    writer.close()
    os.close(writing)
    assert writer.lost == 2


async def test_a_reader_that_does_not_read_blocks_nobody() -> None:
    reading, writing = os.pipe()
    writer = LineWriter(writing, "test")
    for _ in range(2000):
        writer.write("x" * 1000 + "\n")
        writer.flush()
    assert writer.lost > 0
    os.close(reading)
    writer.close()
    os.close(writing)


@given(st.text())
def test_text_from_outside_is_one_harmless_word(text: str) -> None:
    word = escape(text)
    assert word
    assert all("!" <= character <= "~" for character in word)
    assert not set(word) & set('"\\=')


@pytest.mark.parametrize(
    ("text", "word"), [("abc-1", "abc-1"), ("", "-"), ("a\nb=c", "a%0ab%3dc"), ("é", "%c3%a9")]
)
def test_examples(text: str, word: str) -> None:
    assert escape(text) == word

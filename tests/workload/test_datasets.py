"""Every source gives rows of the lengths it was asked for, or one line that says what is wrong with it."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetlb.errors import TraceError
from hetlb.tools.workload.chats import estimate_tokens
from hetlb.tools.workload.trace_formats import custom_rows, random_rows, read_trace, sharegpt_rows


def written(tmp_path: Path, text: str, name: str = "data.txt") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def conversation(*values: str) -> dict[str, object]:
    turns = zip(("human", "gpt") * len(values), values, strict=False)
    return {"conversations": [{"from": speaker, "value": value} for speaker, value in turns]}


def test_a_trace_keeps_its_prompts_sessions_and_blocks(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "arrival_s,input_tokens,output_tokens,session_id,turn,hash_ids,prompt\n"
        '0,5,2,a,1,"[12, 7]",\n1,6,2,,,,What is it?\n',
    )
    first, second = read_trace(path)
    assert (first.session, first.turn, first.hash_ids, first.text) == ("a", "1", ("12", "7"), None)
    assert (second.session, second.hash_ids, second.text) == ("", (), "What is it?")


@given(st.integers(1, 4000), st.integers(1, 4000), st.floats(0, 1), st.integers(1, 40), st.integers())
def test_random_lengths_stay_in_their_range(
    input_tokens: int, output_tokens: int, ratio: float, count: int, seed: int
) -> None:
    rows = random_rows(count, input_tokens, output_tokens, ratio, random.Random(seed))
    assert rows == random_rows(count, input_tokens, output_tokens, ratio, random.Random(seed))
    assert len(rows) == count
    for row in rows:
        for value, asked in ((row.input_tokens, input_tokens), (row.output_tokens, output_tokens)):
            assert max(1, asked * (1 - ratio) - 1) <= value <= asked * (1 + ratio) + 1
            assert ratio > 0 or value == asked


def test_sharegpt_gives_first_questions_and_the_length_of_their_answers(tmp_path: Path) -> None:
    entries = [
        conversation("q" * 40, "a" * 80, "more"),
        conversation("question without an answer"),
        conversation("hi", "too short a question " * 3),
        conversation("a long question " * 1000, "answered " * 9),
        conversation("w" * 40, "ok"),
    ]
    path = written(tmp_path, json.dumps(entries))
    (row,) = sharegpt_rows(path, None, random.Random(0))
    assert (row.text, row.input_tokens, row.output_tokens) == ("q" * 40, 10, 20)
    fixed = sharegpt_rows(path, 7, random.Random(0))
    assert sorted(row.text or "" for row in fixed) == ["q" * 40, "w" * 40]
    assert {row.output_tokens for row in fixed} == {7}


def test_the_seed_decides_the_order_of_sharegpt(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps([conversation(f"{i:040}", "a" * 80) for i in range(30)]))
    one, again, other = (sharegpt_rows(path, None, random.Random(seed)) for seed in (1, 1, 2))
    assert one == again != other


def test_prompts_of_a_file(tmp_path: Path) -> None:
    plain = custom_rows(written(tmp_path, "What is it?\n\n  {no json}\n"), 9)
    assert [(row.text, row.output_tokens) for row in plain] == [("What is it?", 9), ("  {no json}", 9)]
    lines = '{"prompt": "Wie geht’s?", "output_tokens": 3}\n{"prompt": "x"}\n'
    rows = custom_rows(written(tmp_path, lines, "data.jsonl"), 9)
    assert [(row.text, row.output_tokens) for row in rows] == [("Wie geht’s?", 3), ("x", 9)]
    assert rows[0].input_tokens == estimate_tokens("Wie geht’s?") == 4


def test_texts_with_separators_and_half_characters(tmp_path: Path) -> None:
    lines = '{"prompt": "one\u2028line"}\r\n{"prompt": "half \\ud83d"}\n'
    rows = custom_rows(written(tmp_path, lines, "data.jsonl"), 9)
    assert [row.text for row in rows] == ["one\u2028line", "half ?"]
    turns = [{"value": "half \ud83d of a character"}, {"value": "an answer of some length"}]
    (row,) = sharegpt_rows(
        written(tmp_path, json.dumps([{"conversations": turns}]), "x.json"), None, random.Random(0)
    )
    assert row.text == "half ? of a character"


def test_nesting_without_end_is_one_line(tmp_path: Path) -> None:
    path = written(tmp_path, "[" * 100_000, "x.jsonl")
    with pytest.raises(TraceError, match="expected JSON"):
        custom_rows(path, 5)
    with pytest.raises(TraceError, match="expected JSON"):
        sharegpt_rows(path, None, random.Random(0))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "x.jsonl",
            '{"prompt": 5}\n',
            "line 1: prompt: expected a text, got 5",
        ),
        ("x.jsonl", '{"prompt": "a"}\n{oops\n', "line 2: expected JSON"),
        (
            "x.jsonl",
            '{"prompt": "a", "output_tokens": 0}\n',
            "line 1: output_tokens: expected tokens from 1",
        ),
        ("x.txt", "\n\n", "expected at least one prompt, got none"),
        ("x.json", "{}", "expected conversations (ShareGPT's conversations, or messages with role and"),
        ("x.json", "[", "expected JSON"),
        ("x.json", '[{"id": 1}]', "expected conversations (ShareGPT's conversations, or"),
        ("x.json", '[{"conversations": [1, 2]}]', "conversations (ShareGPT's conversations, or messages"),
        ("x.json", "[]", "expected conversations (ShareGPT's conversations, or messages"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = written(tmp_path, text, name)
    read = partial(sharegpt_rows, output_tokens=None, rng=random.Random(0))
    with pytest.raises(TraceError) as caught:
        (read if name.endswith(".json") else partial(custom_rows, output_tokens=5))(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="none: no such file"):
        custom_rows(tmp_path / "none", 5)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(TraceError, match="expected UTF-8 text"):
        custom_rows(binary, 5)

"""The columns of a trace, read and refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetlb.errors import TraceError
from hetlb.tools.workload.rows import spans_of
from hetlb.tools.workload.trace_formats import read_trace


def written(tmp_path: Path, columns: str, *lines: str) -> Path:
    path = tmp_path / "t.csv"
    path.write_text("\n".join([f"arrival_s,input_tokens,output_tokens,{columns}", *lines]) + "\n")
    return path


def test_every_column_has_its_meaning(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "session_id,turn,hash_ids,tenant,sequences,n,endpoint",
        ",5,7,s,2,sys=40 9,acme,16,2,",
        ",5,0,,,,,64,,embeddings",
    )
    first, second = read_trace(path)
    assert (first.session, first.turn, first.hash_ids) == ("s", "2", ("sys=40", "9"))
    assert (first.tenant, first.sequences, first.n, first.endpoint) == ("acme", 16, 2, "completions")
    assert (second.tenant, second.sequences, second.n, second.endpoint) == ("", 64, 1, "embeddings")


@pytest.mark.parametrize(
    ("column", "value", "expected"),
    [
        ("sequences", "0", "expected a whole number from 1"),
        ("sequences", "two", "expected a whole number from 1"),
        ("sequences", "0000000001999", "expected a whole number from 1"),
        ("n", "-1", "expected a whole number from 1"),
        ("n", "99999999999", "expected a whole number from 1"),
        ("endpoint", "chat", "expected one of completions, embeddings"),
    ],
)
def test_mistakes_name_line_and_column(tmp_path: Path, column: str, value: str, expected: str) -> None:
    path = written(tmp_path, column, ",5,7,", f",5,7,{value}")
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}: line 3: {column}: {expected}")
    assert repr(value) in str(caught.value)


def test_spans_end_with_the_prompt() -> None:
    assert spans_of(("a=30", "b", "c"), 95, 50) == [("a", 30), ("b", 50), ("c", 15)]
    assert spans_of(("a", "b"), 50, 50) == [("a", 50)]

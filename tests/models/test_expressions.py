"""Expressions of a model's file: they match as `re` does, and none takes long."""

from __future__ import annotations

import contextlib
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hetlb.errors import ConfigError
from hetlb.tools.models.expressions import Expression
from hetlb.tools.models.quantization import Patterns

ATOMS = st.sampled_from(
    ["a", "b", r"\.", ".", "[ab]", "[^a]", r"\d", r"[\w.]", r"\S", "[a-b0]", "^", "$", "(?:)", "a|b", "(b|)"]
)


def grouped(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    repeats = st.sampled_from(["", "*", "+", "?", "{2}", "{1,3}", "*?", "{0,2}?"])
    return st.one_of(
        st.lists(inner, max_size=4).map("".join),
        st.tuples(inner, repeats).map(lambda each: f"(?:{each[0]}){each[1]}"),
        st.tuples(inner, inner).map(lambda each: f"(?:{each[0]}|{each[1]})"),
    )


def read(text: str) -> bool:
    with contextlib.suppress(ValueError):  # repeats within repeats within repeats
        return Expression(text) is not None
    return False


@given(st.recursive(ATOMS, grouped, max_leaves=6).filter(read), st.text("ab0.\n", max_size=8))
@example("(?:a*){2}b", "aab")
@example("a$", "a\n")
def test_it_matches_as_re_does(text: str, name: str) -> None:
    expression = Expression(text)
    assert expression.match(name) is (re.match(text, name) is not None)


NAME = "model.layers.0.self_attn.q_proj" + "a" * 60
LONG = [
    "(a+)+$", "(a*)*b", "(.*)*b", "(a|a)*b", "a?" * 300 + "a" * 300, ".*" * 400 + "b", "(.*a){40}b",
    "(.{0,60}){60}b", "a{1000000000}b", "(a?){1000000000}b", ".*.*.*.*.*.*.*.*!",
]  # fmt: skip


@pytest.mark.parametrize("text", LONG, ids=range(len(LONG)))
def test_no_expression_takes_long(text: str) -> None:
    """Each of them would take `re` longer than a test may."""
    patterns = Patterns({"ignore": [f"re:{text}"]})
    assert patterns.match(NAME[:20]) in (True, False)
    assert patterns.match("a" * 60) in (True, False)


@pytest.mark.parametrize(
    "text",
    [
        "(a)\\1",
        "(?=a)b",
        "(?i)a",
        r"\ba",
        "(",
        "a" * 1025,
        "(?:" * 250 + ")" * 250 + "(" * 200,
        "((a+)+)+",
        "(?" * 500,
        "a*+",
        "(?>a)",
    ],
)
def test_what_is_not_read_is_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a plain expression") as refused:
        Patterns({"ignore": [f"re:{text}"]})
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300

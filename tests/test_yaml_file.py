"""The YAML reader: what PyYAML reads, within bounds, and errors that name the value and stay short."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hetlb.errors import ConfigError, InputError
from hetlb.inputs import yaml_file
from hetlb.inputs.mistakes import mistakes_in, short
from hetlb.inputs.yaml_file import NonNegative, Positive, convert, load_yaml, parse_yaml, yaml_text


class Inner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of a file."""

    name: str
    weight: Positive = 1.0
    count: int = 0


class Outer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file."""

    items: tuple[Inner, ...] = ()
    weights: dict[str, NonNegative] = {}
    text: str | Inner | None = None


def read(path: Path, text: str) -> Any:
    path.write_text(text)
    return parse_yaml(path, ConfigError)


def error_of(path: Path, text: str) -> str:
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_yaml(path, Outer, ConfigError)
    for line in caught.value.lines:
        assert line.startswith(f"{path}:")
        assert len(line) < 1200
        assert line.isprintable()
    return caught.value.lines[0].removeprefix(f"{path}: ")


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=40)
    | st.sampled_from(
        ["1_000", "0x1F", "0b11", "1:30", "yes", "off", "~", "1e3", "5e-8", "+.5", "-", "<<", "=", "a: b"]
    )
)
DOCUMENTS = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=10), inner, max_size=5),
    max_leaves=30,
)


class Dumper(yaml.SafeDumper):
    """PyYAML's own writer, which also quotes text that looks like a number of YAML 1.2."""


Dumper.yaml_implicit_resolvers = yaml_file._Resolver.yaml_implicit_resolvers


def plain(value: Any) -> Any:
    """What is the same value to the reader: keys are text, a whole number is an int."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return int(value) if isinstance(value, float) and value == int(value) and abs(value) < 2**53 else value


@given(document=DOCUMENTS, flow=st.booleans())
def test_what_is_dumped_is_read(tmp_path_factory: pytest.TempPathFactory, document: Any, flow: bool) -> None:
    text = yaml.dump(document, Dumper=Dumper, default_flow_style=flow, sort_keys=False)
    path = tmp_path_factory.getbasetemp() / "dumped.yaml"
    assert repr(read(path, text)) == repr(plain(document))


@given(text=st.text(alphabet="ab:-?&*<!|>{}[],'\"# \n\t1.e~%@", max_size=60))
def test_any_text_is_data_or_one_line(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    lines: list[str] = []
    try:
        read(path, text)
    except InputError as error:
        lines = error.lines
    assert all(line.startswith(f"{path}:") and line.isprintable() for line in lines)


EXAMPLES = [
    *Path(__file__).parents[1].glob("configs/*.yaml"),
    *Path(__file__).parents[1].glob("profiling/*.yaml"),
]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_libyaml_and_python_read_the_same(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    first = parse_yaml(path, ConfigError)
    monkeypatch.setattr(yaml_file, "_Loader", yaml.SafeLoader)
    assert parse_yaml(path, ConfigError) == first


def test_anchors_and_merged_keys(tmp_path: Path) -> None:
    text = """
      base: &base {weight: 2, name: x}
      one: {<<: *base, name: y}
      two: {<<: [*base, {count: 3, weight: 4}]}
      same: *base
      8: 8.0e9
    """
    assert read(tmp_path / "f", text) == {
        "base": {"weight": 2, "name": "x"},
        "one": {"weight": 2, "name": "y"},
        "two": {"weight": 2, "name": "x", "count": 3},
        "same": {"weight": 2, "name": "x"},
        "8": 8_000_000_000,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [*a]", "line 1: expected valid YAML: expected the anchor of *a before it"),
        ("a: *b", "line 1: expected valid YAML: expected the anchor of *b before it"),
        ("a: 1\nb: 2\na: 3", "line 3: expected valid YAML: the key 'a' stands here twice"),
        ("{[1]: 2}", "line 1: expected valid YAML: expected a plain key"),
        ("<<: [1]", "expected valid YAML: expected a mapping, or a list of them, behind <<"),
        ("a: !!python/name:os x", "expected no tag, got 'tag:yaml.org,2002:python/name:os'"),
        ("a: !!int x", "line 1: expected valid YAML: expected a value of !!int, got 'x'"),
        ("--- 1\n--- 2", "line 2: expected valid YAML: expected a single document"),
        ("[" * 100, "expected valid YAML: expected at most 32 levels, got more"),
        ("- " * 100, "expected valid YAML: expected at most 32 levels, got more"),
        ("weights: {a: .inf}", "weights.a: expected a finite number, got inf (line 1)"),
        ("weights: {a: 1e999}", "weights.a: expected a finite number, got inf (line 1)"),
        ("a.b]c: 1", "a.b]c: unknown key, expected one of items, weights, text (line 1)"),
        ("weights: {a: .nan}", "weights.a: expected a finite number, got nan (line 1)"),
        ("weights:\n  a: 1e-320", "expected 0 or a size from 1e-100 to 1e100, got 1e-320 (line 2)"),
        (f"weights: {{a: {'9' * 5000}}}", "weights.a: expected a number, got '99999"),
        (f"weights: {{a: 0x{'9' * 5000}}}", "weights.a: expected a number, got '0x9999"),
        ("items:\n- {name: a, weight: 0}", "items[0].weight: expected a number > 0.0, got 0 (line 2)"),
        ("items: [{name: a, count: 2.5}]", "items[0].count: expected a whole number, got 2.5 (line 1)"),
        ("items: {a: 1}", "items: expected a list, got {'a': 1} (line 1)"),
        ("text: {naem: x}", "text.naem: unknown key, expected one of name, weight, count (did"),
        (f"{'k' * 1000}: 1", "kkkkkkkk"),
        (f"weights: {{{'k' * 1000}: -1}}", "weights.kkkkkk"),
        (f"items: {['x' * 1000] * 1000}", "items[0]: expected a mapping of keys, got 'xxxxxx"),
        ('"a\\nb": 1', "a\\nb: unknown key"),
        ("- 1", "the file: expected a mapping of keys, got [1]"),
        ("", "the file: expected a mapping of keys, got an empty file"),
        ("a: \x07", "expected valid YAML:"),
    ],
)  # fmt: skip
def test_errors_are_one_short_line(tmp_path: Path, text: str, message: str) -> None:
    assert message in error_of(tmp_path / "f.yaml", text)


def test_whole_numbers_may_be_written_with_an_exponent(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text("items: [{name: a, count: 6.9e5, weight: 3}]")
    assert load_yaml(path, Outer, ConfigError).items == (Inner("a", 3.0, 690_000),)


@pytest.mark.parametrize(
    "number", ids=range(5), argvalues=[float("inf"), float("nan"), 1e-320, 10**5000, -(10**400)]
)
def test_requests_are_held_to_the_same_numbers(number: float) -> None:
    with pytest.raises(ConfigError, match=r"^weight: expected (0 or a size|a finite number).*, got .{1,60}$"):
        convert({"name": "a", "weight": number}, Inner)


BOMBS = {
    "a list": "a: [" + "1," * 90_000 + "]",
    "lists": "a: [" + "[]," * 90_000 + "]",
    "keys": "a: {" + ",".join(f"{n}: 1" for n in range(40_000)) + "}",
    "laughs": "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{f'*a{n - 1},' * 10}]\n" for n in range(1, 20)),
    "merges": "a0: &a0 {x: 1}\n"
    + "".join(f"a{n}: &a{n} {{<<: [{f'*a{n - 1},' * 10}]}}\n" for n in range(1, 20)),
    "anchors": "a0: &a0 1\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 15_000)),
    "text": "a: '" + "x" * (1 << 20) + "'",
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_within_their_own_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    most_bytes, most_values = 1 << 20, 10_000
    monkeypatch.setattr(yaml_file, "MAX_FILE_BYTES", most_bytes)
    monkeypatch.setattr(yaml_file, "MAX_VALUES", most_values)
    path = tmp_path / "bomb.yaml"
    path.write_text(BOMBS[name])
    tracemalloc.start()
    try:
        refusal = r"expected (at most [0-9]+ values, got more|a readable file: larger than 1 MiB)"
        with pytest.raises(InputError, match=refusal):
            load_yaml(path, Outer, ConfigError)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The text as bytes and as str, and some 200 bytes for each value and what the parser holds.
    assert peak < 2 * most_bytes + 200 * most_values + (1 << 20)


def test_mistakes_are_told_together_but_not_all() -> None:
    assert len(mistakes_in({"items": [1] * 100_000}, Outer)) == 20
    assert mistakes_in({"items": [{"name": 1}, {"nam": "x"}]}, Outer) == [
        "items[0].name: expected text, got 1",
        "items[1].nam: unknown key, expected one of name, weight, count (did you mean name?)",
        "items[1].name: expected a value, but the key is missing",
    ]


@given(value=DOCUMENTS | st.text() | st.binary() | st.integers(10**4000, 10**5000))
def test_a_value_is_shown_in_sixty_characters(value: Any) -> None:
    assert len(short(value)) <= 60


def test_what_is_written_is_read_as_it_was(tmp_path: Path) -> None:
    document = {
        "name": "12e4",
        "rate": 5e-8,
        "big": 1e16,
        "rows": [[1, 2.5], [3, 4.0]],
        "words": ["yes", "0.32"],
    }
    path = tmp_path / "f.yaml"
    path.write_text(yaml_text(document))
    assert parse_yaml(path, ConfigError) == document

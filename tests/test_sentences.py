"""Words that a user sees change in review alone: the file of all sentences is what the code says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
#: Openings and words that the house decided against, in any sentence.
AVOIDED = re.compile(
    r"\b(of which|whose|somebody|nobody|whoever|no matter)\b|^(How|Why|Which) |not taken over|all is well"
)


def sentences() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sentences", ROOT / "configs" / "site" / "sentences.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_file_of_sentences_is_what_the_code_says() -> None:
    made = sentences()
    assert made.GOLDEN.read_text() == made.page(), "read the change of words, then run `make reference`"


def test_a_sentence_is_found_whatever_it_is_built_of(tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    code.write_text(
        '"""A docstring is for programmers."""\n'
        'def f(name):\n    """Nor is this one for users."""\n'
        '    raise InputError(f"{name} is down: start it " "or check its network")\n'
        '    print("short"); re.compile(r"^a pattern of words\\\\d$")\n'
    )
    assert list(sentences().sentences_of(code)) == ["{name} is down: start it or check its network"]


def test_the_words_that_were_decided_against_stand_in_no_sentence() -> None:
    lines = (ROOT / "tests" / "sentences.txt").read_text().splitlines()
    assert len(lines) > 300
    assert [line for line in lines if AVOIDED.search(re.sub(r"{[^}]*}", "", line))] == []

"""Tokens of prompts by a tokenizer of the fleet file."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetlb.balancer.config.fleet import load_fleet
from hetlb.errors import ConfigError

FLEET = "version: 1\nmodels:\n  - {name: m, tokenizer: words, instances: [{url: 'http://a:1'}]}\n"


def test_a_tokenizer_counts_the_tokens_of_its_model(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"one": 0, "two": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "words").mkdir()
    words.save(str(tmp_path / "words" / "tokenizer.json"))
    (tmp_path / "fleet.yaml").write_text(FLEET)
    counters = load_fleet(tmp_path / "fleet.yaml").token_counters
    assert {model: count("one two three") for model, count in counters.items()} == {"m": 3}


def test_a_tokenizer_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "fleet.yaml").write_text(FLEET)
    with pytest.raises(ConfigError, match=r"models\[0\]\.tokenizer: expected a tokenizer\.json, got"):
        load_fleet(tmp_path / "fleet.yaml").token_counters  # noqa: B018


def test_without_one_none_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET.replace("tokenizer: words, ", ""))
    assert load_fleet(tmp_path / "fleet.yaml").token_counters == {}

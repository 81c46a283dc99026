"""The model's folder: tokenizer, chat template, answers as text, config.json."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stage.toy import EOS, make_folder

from hetlb.errors import ConfigError
from hetlb.tools.stage.checkpoint import load_config, stage_tensors, tensor_files
from hetlb.tools.stage.stage_messages import Token
from hetlb.tools.stage.text import AnswerText, Ending, TemplateError, TextModel

CONFIG: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 512,
}  # fmt: skip


def config_of(folder: Path, **changed: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(CONFIG | changed))
    return load_config(folder)


def read(text: str, **ending: Any) -> tuple[str, str | None, int | str | None, list[str]]:
    """An answer byte by byte: its text, why it ended, and the pieces."""
    answer = AnswerText(chr, Ending(**{"max_tokens": 1000} | ending))
    pieces = []
    for number, letter in enumerate(text):
        piece = answer.add(Token(1, number, ord(letter)))
        pieces.append(piece.text)
        if piece.finish is not None:
            return "".join(pieces), piece.finish, piece.stop_reason, pieces
    return "".join(pieces), None, None, pieces


def test_stop_strings_end_an_answer_and_never_leave() -> None:
    assert read("one two three", stop=("two",)) == ("one ", "stop", "two", ["", "", *"one ", ""])
    assert read("one two three", stop=("two",), keeps_stop=True)[0] == "one two"
    assert read("abcabd", stop=("abd",))[:3] == ("abc", "stop", "abd")
    assert read("abc", stop=("cd",))[0] == "ab", "what may begin a stop string is held back"
    assert read("abc", max_tokens=3, stop=("cd",))[:2] == ("abc", "length"), "and leaves at the end"
    assert read("xyx", stop=("x",), min_tokens=1)[:3] == ("xy", "stop", "x")
    assert read("ab", eos=frozenset({ord("b")}))[:3] == ("a", "stop", None)
    assert read("ab", stop_tokens=frozenset({ord("b")}))[:3] == ("a", "stop", ord("b"))


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_pieces_joined_are_the_text_before_the_first_stop(text: str, stop: list[str]) -> None:
    found, finish, _, pieces = read(text + "!", stop=tuple(stop), max_tokens=len(text) + 1)
    longest = max(map(len, stop))
    for number in range(1, len(pieces)):
        assert len("".join(pieces[:number])) > number - longest, (
            "no more is held than a stop string could take"
        )
    ends = [at + len(each) for each in stop if (at := text.find(each)) >= 0]
    if not ends:
        assert (found, finish) == (text + "!", "length")
    else:
        seen = text[: min(ends)]
        assert finish == "stop"
        assert found == seen[: min(seen.find(each) for each in stop if each in seen)]


def test_the_tokenizer_of_a_folder(tmp_path: Path) -> None:
    model = TextModel(make_folder(tmp_path / "m"))
    tokens = model.encode("héllo wörld", add_special_tokens=True)
    assert model.decode(tokens) == "héllo wörld"
    decode = model.stream(skip_special_tokens=True)
    assert "".join(map(decode, tokens)) == "héllo wörld"
    assert model.decode(sorted(model.eos)) == EOS
    assert model.chat([{"role": "user", "content": "hi"}], add_generation_prompt=True) == "user:hi;"


def test_templates_that_refuse_or_fail_are_one_error(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    template = folder / "chat_template.jinja"
    template.write_text("{{ raise_exception('only users') }}")
    with pytest.raises(TemplateError, match="only users"):
        TextModel(folder).chat([])
    template.write_text("{{ messages[0].content.__class__.__mro__ }}{{ 1 // 0 }}")
    with pytest.raises(TemplateError):
        TextModel(folder).chat([{"role": "user", "content": "x"}])
    template.unlink()
    with pytest.raises(TemplateError, match="no chat template"):
        TextModel(folder).chat([])
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: expected a tokenizer file"):
        TextModel(folder)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "gpt2"}, "model_type: expected llama or mistral or qwen2 or qwen3, got 'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act: expected silu"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers: expected a whole number, got '4'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of 4"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "rope_type: expected one of default",
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config: expected none"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps: expected a finite number"),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": "2",
            },
            "max_window_layers: expected a whole number, got '2'",
        ),
    ],
)
def test_models_that_are_not_computed_exactly_are_refused(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(tmp_path, **changed)


def test_windows_and_biases_by_family(tmp_path: Path) -> None:
    assert config_of(tmp_path, model_type="mistral", sliding_window=8).windows == (8,) * 4
    assert config_of(tmp_path, sliding_window=8).windows == (None,) * 4
    qwen = {"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 2}
    assert config_of(tmp_path, **qwen).windows == (None,) * 4
    assert config_of(tmp_path, **qwen, use_sliding_window=True).windows == (None, None, 8, 8)
    unstated = {**qwen, "max_window_layers": None, "use_sliding_window": True}
    assert config_of(tmp_path, **unstated).windows == (None,) * 4
    assert config_of(tmp_path, model_type="qwen2").qkv_bias
    assert config_of(tmp_path, model_type="qwen3").qk_norm


def test_rope_scaling_of_llama_3(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    rope = config_of(tmp_path, rope_scaling=scaling, rope_theta=500000.0).rope
    plain = [500000.0 ** (-i / 64) for i in range(64)]
    scaled = rope.frequencies(128)
    for before, after in zip(plain, scaled, strict=True):
        length = 2 * math.pi / before
        if length < 2048:
            assert after == before
        elif length > 8192:
            assert after == before / 8
        else:
            assert before / 8 <= after <= before
    linear = {"type": "linear", "factor": 4.0}
    assert config_of(tmp_path, rope_scaling=linear).rope.frequencies(4) == [0.25, 0.0025]


def test_a_stage_reads_only_its_tensors(tmp_path: Path) -> None:
    config = config_of(tmp_path, tie_word_embeddings=True)
    middle, last = stage_tensors(config, 1, 3), stage_tensors(config, 3, 4)
    assert not any("embed" in name or name == "model.norm.weight" for name in middle)
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= set(last)
    assert "lm_head.weight" in stage_tensors(config_of(tmp_path), 3, 4)
    assert "model.embed_tokens.weight" not in stage_tensors(config_of(tmp_path), 3, 4)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one", "b": "two", "c": "one"}}))
    assert list(tensor_files(tmp_path, ["a", "b", "c"])) == [
        (tmp_path / "one", ["a", "c"]),
        (tmp_path / "two", ["b"]),
    ]
    index.write_text(json.dumps({"weight_map": {"a": "../one"}}))
    with pytest.raises(ConfigError, match=r"weight_map\.a: expected a file name"):
        list(tensor_files(tmp_path, ["a"]))

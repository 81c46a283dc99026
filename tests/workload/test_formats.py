"""Files as people have them: what each is taken for, in which units, and a list for what is none of them."""

from __future__ import annotations

import gc
import gzip
import io
import json
import os
import re
import sys
import threading
import tracemalloc
import zlib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetlb.errors import TraceError
from hetlb.files import expect_pipes
from hetlb.tools.workload import input_limit
from hetlb.tools.workload.measured_logs import read_log
from hetlb.tools.workload.rows import Row
from hetlb.tools.workload.trace_formats import read_trace

SHARED = Path(__file__).parents[3] / "shared/data/formats"

MOONCAKE = (
    '{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}\n'
    '{"timestamp": 3000, "input_length": 7322, "output_length": 490, "hash_ids": [0, 14]}\n'
)
BAILIAN = (
    '{"chat_id": 7, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 20, "output_length": 3, '
    '"type": "text", "turn": 1, "hash_ids": [8]}\n'
    '{"chat_id": 9, "parent_chat_id": 7, "timestamp": 61.5, "input_length": 40, "output_length": 5, '
    '"type": "text", "turn": 2, "hash_ids": [8, 9]}\n'
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9805900,396,109\n"
)
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:59.750000+00:00,2162,5\n2024-05-10 00:01:00.000000+00:00,2399,6\n"
)
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n9,ChatGPT,472,0,472,API log\n45,GPT-4,1087,230,1317,API log\n"
)
SPLITWISE = (
    "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n"
    "0,2,0,0.25,1,100,20\n1,2,0,0.5,2,110,30\n"
)
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,374,44\n1.25,20,5\n"
LLMSERVINGSIM = (
    '{"input_toks": 100, "output_toks": 20, "arrival_time_ns": 1500000000}\n'
    '{"input_toks": 110, "output_toks": 30, "arrival_time_ns": 4000000000}\n'
)

AIPERF_TEXTS = (
    '{"timestamp": 100, "text_input": "hello there", "output_length": 5}\n'
    '{"timestamp": 1600, "text_input": "again", "output_length": 6}\n'
)
EPOCH = "created_at_unix,input_tokens,output_tokens\n1700000000.5,10,4\n1700000002.0,20,5\n"

#: A name of each, what is said of it, its text, and its rows: seconds from the first, prompt, answer.
TRACES = {
    "mooncake.jsonl": ("Mooncake", MOONCAKE, [(0, 6758, 500), (3, 7322, 490)]),
    "bailian.jsonl": ("Bailian", BAILIAN, [(0, 20, 3), (60, 40, 5)]),
    "azure_2023.csv": ("Azure", AZURE, [(0, 374, 44), (4.3, 396, 109)]),
    "azure_2024.csv": ("Azure", AZURE_2024, [(0, 2162, 5), (0.25, 2399, 6)]),
    "burstgpt.csv": ("BurstGPT", BURSTGPT, [(0, 472, 18), (40, 1087, 230)]),
    "splitwise.csv": ("Splitwise", SPLITWISE, [(0, 100, 20), (0.25, 110, 30)]),
    "vidur.csv": ("Vidur", VIDUR, [(0, 374, 44), (0.75, 20, 5)]),
    "llmservingsim.jsonl": ("LLMServingSim", LLMSERVINGSIM, [(0, 100, 20), (2.5, 110, 30)]),
}
#: Such without a real piece.
MADE = {
    "aiperf_texts.jsonl": ("prompts", AIPERF_TEXTS, [(0, 3, 5), (1.5, 2, 6)]),
    "epoch.csv": ("keys name what they are", EPOCH, [(0, 10, 4), (1.5, 20, 5)]),
}


def lengths(rows: list[Row]) -> list[tuple[float, int, int]]:
    """Return seconds from the first request, prompt and answer tokens of each."""
    times = [row.arrival_s for row in rows]
    assert all(at is not None for at in times)
    return [
        (round((row.arrival_s or 0.0) - (times[0] or 0.0), 6), row.input_tokens, row.output_tokens)
        for row in rows
    ]


@pytest.mark.parametrize("name", [*TRACES, *MADE])
@pytest.mark.parametrize("written", ["as it is", "CRLF", "BOM", "gzip", "blank line at the end"])
def test_a_public_trace_is_known_by_its_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, written: str
) -> None:
    said, text, expected = (TRACES | MADE)[name]
    data = text.encode()
    if written == "CRLF":
        data = data.replace(b"\n", b"\r\n")
    elif written == "BOM":
        data = b"\xef\xbb\xbf" + data
    elif written == "gzip":
        data = gzip.compress(data)
    elif written == "blank line at the end":
        data += b"\n"
    path = tmp_path / "file"  # its name says nothing
    path.write_bytes(data)
    assert lengths(read_trace(path)) == expected
    told = capsys.readouterr().err
    assert said in told
    assert "2 requests" in told


def test_what_a_public_trace_says_of_contents_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t"
    path.write_text(MOONCAKE)
    assert [row.hash_ids for row in read_trace(path)] == [("0", "1", "2"), ("0", "14")]
    path.write_text(BAILIAN)  # blocks of 16 tokens, whatever the reader takes; one conversation
    first, second = read_trace(path)
    assert (first.hash_ids, second.hash_ids) == (("8=16",), ("8=16", "9=16"))
    assert (first.session, first.turn, second.session, second.turn) == ("7", "1", "7", "2")
    path.write_text(SPLITWISE)
    assert [row.sequences for row in read_trace(path)] == [1, 2]
    capsys.readouterr()
    path.write_text(BURSTGPT)
    read_trace(path)
    assert "left out: 1 that failed" in capsys.readouterr().err


def test_further_columns_and_another_separator_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t"
    lines = [f"{number};{line};x" for number, line in enumerate(VIDUR.replace(",", ";").splitlines())]
    path.write_text("\n".join(["index;" + lines[0][2:], *lines[1:]]))
    assert lengths(read_trace(path)) == TRACES["vidur.csv"][2]


def test_a_pipe_is_read_as_a_file_is(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    text = VIDUR.encode()
    writer = threading.Thread(target=path.write_bytes, args=(gzip.compress(text),))
    writer.start()
    expect_pipes([path])
    assert lengths(read_trace(path)) == TRACES["vidur.csv"][2]
    writer.join()


@given(
    st.sampled_from(
        ["arrival_s", "arrival_time_ms", "arrivalTimeNs", "Timestamp (us)", "start_time_unix_nano"]
    ),
    st.sampled_from(["prompt_tokens", "input_len", "ISL", "promptTokens", "Input Tokens"]),
    st.sampled_from(["completion_tokens", "output_len", "OSL", "generatedTokens", "Output Tokens"]),
    st.booleans(),
)
def test_keys_that_name_their_unit_are_read(
    tmp_path_factory: pytest.TempPathFactory, arrival: str, prompt: str, answer: str, as_json: bool
) -> None:
    units = {"_s": 1, "_ms": 1e3, "us)": 1e6, "Ns": 1e9, "nano": 1e9}
    per_second = next(size for end, size in units.items() if arrival.endswith(end))
    table = [{arrival: int(second * per_second), prompt: 5, answer: 7} for second in (2, 5)]
    path = tmp_path_factory.mktemp("named") / "t"
    if as_json:
        path.write_text(json.dumps(table))
    else:
        cells = [",".join(map(str, row.values())) for row in table]
        path.write_text("\n".join([",".join(table[0]), *cells]))
    assert lengths(read_trace(path)) == [(0, 5, 7), (3, 5, 7)]


@pytest.mark.parametrize("per_second", [1, 1_000, 1_000_000, 1_000_000_000])
def test_a_time_since_1970_tells_its_unit(tmp_path: Path, per_second: int) -> None:
    path = tmp_path / "t"
    rows = [f"{(1_768_918_269 + second) * per_second},5,7" for second in (0, 3)]
    path.write_text("\n".join(["timestamp,prompt_tokens,completion_tokens", *rows]))
    assert lengths(read_trace(path)) == [(0, 5, 7), (3, 5, 7)]


def test_a_unit_that_nothing_tells_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text("timestamp,prompt_tokens,completion_tokens\n12,5,7\n")
    with pytest.raises(TraceError, match=r"line 2: timestamp: expected .* unit in the name \(timestamp_s, "):
        read_trace(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello\n",
        "a,b,c\n1,2,3\n",
        '{"foo": 1}\n',
        "[]",
        "[1, 2]",
        "<html><body>, not found</body></html>",
        "date,open,close\n2024-01-02,1.5,1.6\n",
    ],
)
def test_an_unknown_file_gets_the_list(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    for read, others in ((read_trace, ("Mooncake", "Azure", "BurstGPT", "ShareGPT")), (read_log, ())):
        if not text and read is read_log:
            continue  # an empty log is called that
        with pytest.raises(TraceError) as caught:
            read(path)
        assert "\n" not in str(caught.value)
        for name in (*others, "arrival_s"):
            assert name in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            VIDUR.replace("374", "many"),
            "line 2: num_prefill_tokens: expected tokens from 0 to .*, got 'many'",
        ),
        (
            VIDUR.replace("374", "3.5"),
            "line 2: num_prefill_tokens: expected a whole number of tokens, got '3.5'",
        ),
        (VIDUR.replace("num_decode", "num_prefill"), "line 1: expected each column once, got 'num_prefill_t"),
        (MOONCAKE.replace("490", "-1"), "line 2: output_length: expected tokens from 0"),
        (MOONCAKE[:-20], "line 2: expected JSON"),
        (
            AZURE.replace("2023-11-16 18:15:50.9805900", "yesterday"),
            "line 3: TIMESTAMP: expected .* got 'yest",
        ),
    ],
)
def test_a_broken_value_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        read_trace(path)


def test_a_turn_without_a_time_arrives_its_delay_after_the_one_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [
        {"session_id": "a", "timestamp": 1000, "input_length": 5, "output_length": 1},
        {"session_id": "a", "delay": 500, "input_length": 5, "output_length": 1},
        {"session_id": "b", "timestamp": 1200, "input_length": 5, "output_length": 1},
        {"session_id": "a", "delay": 250, "input_length": 5, "output_length": 1},
    ]
    path = tmp_path / "t"
    path.write_text("\n".join(map(json.dumps, turns)))
    assert [row.arrival_s for row in read_trace(path)] == [1.0, 1.5, 1.2, 1.75]
    assert "left out: how long the answers before 2 delayed turns took" in capsys.readouterr().err


def test_the_length_that_bench_gives_is_for_answers_without_one(tmp_path: Path) -> None:
    pair, chat = {"prompt": "Six times seven?", "completion": "It is 42."}, ["Six times seven?", "a" * 80]
    path = tmp_path / "t.jsonl"
    for line, tokens in ((pair, 3), ({"data": chat}, 20), ({"prompt": "Six times seven?"}, 256)):
        path.write_text(json.dumps(line))
        assert [row.output_tokens for row in read_trace(path, 256)] == [tokens]


# --- texts -----------------------------------------------------------------------------------------------


def conversation(*turns: tuple[str, str], keys: tuple[str, str, str]) -> dict[str, object]:
    name, who, what = keys
    return {name: [{who: speaker, what: text} for speaker, text in turns]}


@pytest.mark.parametrize("keys", [("conversations", "from", "value"), ("messages", "role", "content")])
@pytest.mark.parametrize("lines", [True, False])
def test_the_first_question_is_what_a_person_asks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: tuple[str, str, str], lines: bool
) -> None:
    asking, answering = ("human", "gpt") if keys[1] == "from" else ("user", "assistant")
    question, answer = (asking, "q" * 40), (answering, "a" * 80)
    rows: list[object] = [
        conversation(question, answer, keys=keys),
        conversation(("system", "be brief " * 9), question, answer, keys=keys),
        conversation((answering, "hello there, it is me"), question, answer, keys=keys),
        {keys[0]: None},
        {keys[0]: []},
        {keys[0]: [1, 2]},
        {},
        conversation(question, keys=keys),
        conversation((asking, ""), answer, keys=keys),
        {keys[0]: [{keys[1]: asking, keys[2]: None}]},
        conversation((asking, "hi"), answer, keys=keys),
    ]
    path = tmp_path / "t"
    path.write_text("\n".join(map(json.dumps, rows)) if lines else json.dumps([*rows, None]))
    found = read_trace(path)
    assert [(row.text, row.input_tokens, row.output_tokens) for row in found] == [("q" * 40, 10, 20)] * 3
    told = capsys.readouterr().err
    assert f"left out: {7 if lines else 8} that are no conversation" in told
    assert "left out: 1 beyond the limits" in told


def test_a_batch_of_openai_is_read(tmp_path: Path) -> None:
    bodies = [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "q" * 40}], "max_tokens": 9}),
        ("/v1/completions", {"prompt": "p" * 20, "max_tokens": 3}),
        ("/v1/embeddings", {"input": ["e" * 8]}),
        ("/v1/responses", {"instructions": "i" * 7, "input": "r" * 8, "max_output_tokens": 6}),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"text": "r" * 12}]}], "max_output_tokens": 7},
        ),
        ("/v1/completions", {"prompt": [5, 6, 7, 8], "max_tokens": 3}),
        ("/v1/embeddings", {"input": [[5, 6], [7, 8, 9]]}),
        ("/v1/rerank", {"query": "q" * 7, "documents": ["d" * 8, {"text": "d" * 7}]}),
        ("/v1/score", {"text_1": "q" * 7, "text_2": ["d" * 8]}),
    ]
    path = tmp_path / "t"
    path.write_text(
        "\n".join(
            json.dumps(
                {"custom_id": str(number), "method": "POST", "url": url, "body": {"model": "m", **body}}
            )
            for number, (url, body) in enumerate(bodies)
        )
    )
    rows = read_trace(path)
    assert [(row.input_tokens, row.output_tokens, row.endpoint) for row in rows] == [
        (10, 9, "completions"),
        (5, 3, "completions"),
        (2, 0, "embeddings"),
        (4, 6, "completions"),
        (3, 7, "completions"),
        (4, 3, "completions"),
        (5, 0, "embeddings"),
        (6, 0, "embeddings"),
        (4, 0, "embeddings"),
    ]
    path.write_text('{"custom_id": "a", "params": {"system": "s", "messages": [], "max_tokens": 5}}')
    assert [(row.input_tokens, row.output_tokens) for row in read_trace(path)] == [(1, 5)]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ('[{"instruction": "Sum up:", "input": "a text", "output": "It is shorter."}, {}]', [(4, 4)]),
        ('{"question": "How many are there?", "context": "Many.", "response": "Many."}\n', [(7, 2)]),
        ('{"task_id": 0, "input_ids": [5, 6, 7], "output_tokens": 64}\n', [(3, 64)]),
        ('{"metadata": {"n": 1}, "samples": [{"input_len": 9, "output_len": 5, "task_id": -1}]}', [(9, 5)]),
        ('{"created": 1700000000, "usage": {"prompt_tokens": 7, "completion_tokens": 3}}\n', [(7, 3)]),
        ('{"createdAt": 1700000000, "usage": {"input": 7, "output": 3, "unit": "TOKENS"}}\n', [(7, 3)]),
        ('{"created_at": "2026-01-01T00:00:00Z", "prompt_eval_count": 7, "eval_count": 3}\n', [(7, 3)]),
        ('{"response": {"usageMetadata": {"promptTokenCount": 7, "candidatesTokenCount": 3}}}\n', [(7, 3)]),
        ('{"attributes": {"llm.token_count.prompt": 7, "llm.token_count.completion": 3}}\n', [(7, 3)]),
        (
            '{"messages": [{"role": "user", "content": "Six times seven?"}, '
            '{"role": "assistant", "content": null, "tool_calls": [{"id": "1"}]}, '
            '{"role": "tool", "content": "42"}, '
            '{"role": "assistant", "content": "It is 42, as was said."}]}\n',
            [(4, 6)],
        ),
        ('[{"ttft_s": 0.1, "number_input_tokens": 7, "number_output_tokens": 3}]', [(7, 3)]),
        ('{"tokens_prompt": 7, "tokens_completion": 3, "created_at": "2026-01-01T00:00:00Z"}\n', [(7, 3)]),
        ('{"prompt": "Six times seven?", "completion": "It is 42."}\n', [(4, 3)]),
        (
            '{"name": "chat", "start_time": "2026-01-01T00:00:00Z", '
            '"attributes": {"gen_ai.usage.input_tokens": 7, "gen_ai.usage.output_tokens": 3}}\n',
            [(7, 3)],
        ),
        ('{"problem": "Six times seven?", "solution": "It is 42."}\n', [(4, 3)]),
        ('{"user": "Six times seven?", "assistant": "It is 42."}\n', [(4, 3)]),
        ('{"article": "Six times seven.", "highlights": "It is 42."}\n', [(4, 3)]),
        ('{"data": ["Six times seven?", "It is 42, as was said."]}\n', [(4, 6)]),
        (
            '[{"items": [{"from": "human", "value": "Six times seven?"}, '
            '{"from": "gpt", "value": "It is 42, as was said."}]}]',
            [(4, 6)],
        ),
        (
            '{"conversation_a": [{"role": "user", "content": "Six times seven?"}, '
            '{"role": "assistant", "content": "It is 42, as was said."}]}\n',
            [(4, 6)],
        ),
    ],
)
def test_data_sets_are_known_by_their_keys(tmp_path: Path, text: str, rows: list[tuple[int, int]]) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    assert [(row.input_tokens, row.output_tokens) for row in read_trace(path)] == rows


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"time_to_first_token": {"avg": 1}, "input_config": {}}', "a summary of AIPerf or GenAI-Perf"),
        ("Type,Name,Request Count,Failure Count\nPOST,/v1,10,0\n", "a summary of Locust"),
        ('{"attack": "", "seq": 1, "latency": 5, "bytes_out": 0, "bytes_in": 2}\n', "results of Vegeta"),
        (
            '{"experiments": [{"requests": [{}]}], "version": ""}',
            "texts of GenAI-Perf: take the profile_export",
        ),
        ('{"metric": "http_reqs", "type": "Point", "data": {"value": 1}}\n', "results of k6"),
        ("timeStamp,elapsed,label,responseCode\n1700000000000,200,chat,200\n", "results of JMeter"),
        ("response-time,DNS+dialup,status-code,offset\n0.01,0.0,200,0.0\n", "results of hey"),
        ('{"summary": {"total": 10.0}, "responseTimeHistogram": {"0.01": 3}}', "a summary of oha"),
        (
            '{"input_len": 9, "output_len": 5, "overall_throughput": 1}\n',
            "batches of SGLang's bench_one_batch",
        ),
        ('{"custom_id": "a", "response": {"body": {}}, "error": null}\n', "the results of a batch"),
    ],
)
def test_results_without_tokens_are_called_by_their_name(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    for read in (read_trace, read_log):
        with pytest.raises(TraceError, match=f"expected each request with its tokens, got {said}"):
            read(path)


@pytest.mark.parametrize("text", ["", " \n", "[]", "[ ]\n"])
def test_a_file_of_nothing_says_so(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(TraceError, match="expected requests, got nothing"):
        read_trace(path)


def test_times_of_a_table_need_a_unit_where_nothing_tells_it(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text("Timestamp,Input Length,Output Length\n0.5,100,20\n1.25,100,20\n")
    with pytest.raises(TraceError, match=r"line 2: Timestamp: expected .* a unit in the name"):
        read_trace(path)


# --- results of load tests -------------------------------------------------------------------------------

#: Requests as (start s, prompt, answer, first token s, whole answer s).
MEASURED = [(10.0 + 0.5 * i, 100 + i, 20 + i, 0.2 + 0.01 * i, 1.2 + 0.02 * i) for i in range(20)]


def guidellm() -> object:
    requests = [
        {"request_start_time": 1.7e9 + start, "prompt_tokens": prompt, "output_tokens": answer}
        | {"request_latency": whole, "time_to_first_token_ms": 1e3 * first}
        for start, prompt, answer, first, whole in MEASURED
    ]
    halves = [
        {"requests": {"successful": requests[:9], "errored": [{}]}},
        {"requests": {"successful": requests[9:]}},
    ]
    return {"metadata": {}, "args": {}, "benchmarks": halves}


def newer_guidellm() -> object:
    requests: list[object] = []
    for start, prompt, answer, first, whole in MEASURED:
        at = 1.7e9 + start
        timings = {"request_start": at, "first_token_iteration": at + first, "request_end": at + whole}
        counts: dict[str, object] = {"input_metrics": {"text_tokens": prompt}, "first_token_iteration": None}
        counts["output_metrics"] = {"text_tokens": None, "total_tokens": answer}
        requests.append({"request_id": "a", "info": {"timings": timings}, **counts})
    return {"benchmarks": [{"requests": {"successful": requests, "errored": [{}]}}]}


def nested() -> str:
    """Columns of a table nested twice, some with their unit beside the value."""
    lines = [
        {"timing": {"sent": {"start_time": at(start)}, "ttft": {"value": 1e3 * first, "unit": "ms"}}}
        | {"usage": {"input": prompt, "output": answer}, "e2e": {"value": whole, "unit": "s"}, "error": None}
        for start, prompt, answer, first, whole in MEASURED
    ]
    return "\n".join(map(json.dumps, [*lines, lines[0] | {"error": {"code": 500}}]))


def spend_log() -> str:
    """As LiteLLM keeps it: moments, also of the first token, and a document around them."""
    lines = [
        {"startTime": at(start), "completionStartTime": at(start + first), "endTime": at(start + whole)}
        | {"usage": {"prompt_tokens": prompt, "completion_tokens": answer}, "error": None}
        for start, prompt, answer, first, whole in MEASURED
    ]
    return json.dumps({"data": [*lines, lines[0] | {"error": "timeout"}]})


def at(seconds: float) -> str:
    return datetime.fromtimestamp(1.7e9 + seconds, UTC).isoformat()


def inference_perf(nested: bool) -> object:
    found: list[object] = [
        {"start_time": 1.0, "end_time": 1.5, "info": {}, "error": {"error_type": "timeout"}}
    ]
    for start, prompt, answer, first, whole in MEASURED:
        times = [start + first, start + whole]
        if nested:
            asked = {"request_metrics": {"text": {"input_tokens": prompt}}}
            info = asked | {"response_metrics": {"output_tokens": answer, "output_token_times": times}}
        else:
            info = {"input_tokens": prompt, "output_tokens": answer, "output_token_times": times}
        found.append({"start_time": start, "end_time": start + whole, "info": info, "error": None})
    return found


def columns(backend: str) -> dict[str, object]:
    return {
        "backend": backend,
        "start_times": [start for start, *_ in MEASURED] + [3.0],
        "input_lens": [prompt for _, prompt, *_ in MEASURED] + [1],
        "output_lens": [answer for _, _, answer, *_ in MEASURED] + [0],
        "ttfts": [first for *_, first, _ in MEASURED] + [0.0],
        "itls": [[(whole - first) / 4] * 4 for *_, first, whole in MEASURED] + [[]],
        "errors": [""] * len(MEASURED) + ["timeout"],
    }


def aiperf() -> str:
    lines = []
    for number, (start, prompt, answer, first, whole) in enumerate([(1.0, 9, 9, 9.0, 9.0), *MEASURED]):
        phase = "profiling" if number else "warmup"
        lines.append(
            {
                "metadata": {"request_start_ns": int(1e9 * start), "benchmark_phase": phase},
                "metrics": {
                    "input_sequence_length": {"value": prompt, "unit": "tokens"},
                    "output_sequence_length": {"value": answer, "unit": "tokens"},
                    "time_to_first_token": {"value": 1e3 * first, "unit": "ms"},
                    "request_latency": {"value": 1e9 * whole, "unit": "ns"},
                },
                "error": None,
            }
        )
    lines.append({"metadata": {"request_start_ns": 0}, "metrics": {}, "error": {"type": "timeout"}})
    return "\n".join(map(json.dumps, lines))


def named_columns() -> str:
    lines = [f"{1e3 * s:.3f},{p},{a},{1e3 * f:.3f},{w:.5f}," for s, p, a, f, w in MEASURED]
    return "\n".join(
        ["start_ms,prompt_tokens,completion_tokens,ttft_ms,latency_s,error", *lines, "1,1,1,,,dead"]
    )


def as_list() -> str:
    """Return what `ray-project/llmperf` writes, with a time of arrival."""
    dead = {"start_s": 0, "number_input_tokens": 1, "number_output_tokens": 0, "ttft_s": 0, "e2e_s": 0}
    lines = [
        {"start_s": start, "number_input_tokens": prompt, "number_output_tokens": answer}
        | {"ttft_s": first, "e2e_s": whole, "error_code": None}
        for start, prompt, answer, first, whole in MEASURED
    ]
    return json.dumps([*lines, dead | {"error_code": 500}])


#: A file of each kind: how it is named, its kind, and its text.
LOGS: dict[str, tuple[str, str, Callable[[], str]]] = {
    "vllm": ("vllm bench serve", "bench", lambda: json.dumps(columns("vllm"))),
    "sglang": ("SGLang", "sglang", lambda: json.dumps(columns("sglang-oai")) + "\n"),
    "aiperf": ("AIPerf", "aiperf", aiperf),
    "guidellm": ("GuideLLM", "guidellm", lambda: json.dumps(guidellm(), indent=1)),
    "inference-perf": ("inference-perf", "inference-perf", lambda: json.dumps(inference_perf(False))),
    "inference-perf, nested": ("inference-perf", "inference-perf", lambda: json.dumps(inference_perf(True))),
    "GuideLLM, newer": ("GuideLLM", "guidellm", lambda: json.dumps(newer_guidellm())),
    "moments in a document": ("keys name what they are", "records", spend_log),
    "nested columns": ("keys name what they are", "records", nested),
    "a JSON list": ("keys name what they are", "records", as_list),
    "columns": ("keys name what they are", "records", named_columns),
}


@pytest.mark.parametrize("name", LOGS)
def test_results_of_load_tests_tell_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    said, kind, text = LOGS[name]
    path = tmp_path / "t"
    path.write_text(text())
    log = read_log(path)
    assert (log.kind, log.failed) == (kind, 1)
    for got, (start, prompt, answer, first, whole) in zip(log.requests, MEASURED, strict=True):
        assert got.arrival_s == pytest.approx(start - MEASURED[0][0], abs=1e-6)
        assert (got.input_tokens, got.output_tokens) == (prompt, answer)
        assert (got.ttft_s, got.e2e_s) == pytest.approx((first, whole), rel=1e-5)
    told = capsys.readouterr().err
    assert said in told
    assert ("1 of the warm-up" in told) == (name == "aiperf")
    # What was measured can be sent again.
    assert [row.input_tokens for row in read_trace(path)] == [prompt for _, prompt, *_ in MEASURED]


def test_a_run_without_start_times_is_read_where_they_follow(tmp_path: Path) -> None:
    path = tmp_path / "t"
    document = {key: value for key, value in columns("sglang").items() if key != "start_times"}
    path.write_text(json.dumps(document | {"request_rate": 4.0}))
    with pytest.raises(TraceError, match=r"start_times: expected .* request_rate 4\.0 does not tell"):
        read_log(path)
    path.write_text(json.dumps(document | {"request_rate": float("inf")}))  # as Python writes it: Infinity
    assert {each.arrival_s for each in read_log(path).requests} == {0.0}
    path.write_text(json.dumps(document | {"request_rate": "inf", "max_concurrency": 1}))
    log = read_log(path)
    for before, after in zip(log.requests, log.requests[1:], strict=False):
        assert after.arrival_s == pytest.approx(before.arrival_s + before.e2e_s)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps(columns("sglang")) * 1 + "\n" + json.dumps(columns("sglang")), "expected one run, got 2"),
        (json.dumps([{"mean_ttft_ms": 3.5, "completed": 8}]), "got a summary of vllm bench"),
        (VIDUR, "expected measured requests, got Vidur's trace"),
        (MOONCAKE, "expected measured requests, got the form of Mooncake"),
    ],
)
def test_what_holds_too_little_is_called_by_its_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        read_log(path)


def test_reading_takes_steps_in_proportion_to_the_records(tmp_path: Path) -> None:
    texts: dict[str, Callable[[int], str]] = {
        "mooncake": lambda count: MOONCAKE * count,
        "bailian": lambda count: BAILIAN * count,
        "azure": lambda count: AZURE + AZURE.partition("\n")[2] * count,
        "conversations": lambda count: json.dumps(
            [{"conversations": [{"from": "human", "value": "q" * 40}, {"from": "gpt", "value": "a" * 40}]}]
            * count
        ),
        "columns": lambda count: named_columns() + "\n1,1,1,1,1," * count,
    }
    for name, text in texts.items():
        steps = []
        for count in (200, 400, 800):
            path = tmp_path / f"{name}-{count}"
            path.write_text(text(count))
            steps.append(_calls(lambda path=path: read_trace(path)))  # type: ignore[misc]
        assert steps[2] - steps[1] < 2.2 * (steps[1] - steps[0]), (name, steps)


def _calls(run: Callable[[], object]) -> int:
    """Return the calls of functions, of Python and of C, that a run makes, none for garbage."""
    count = 0

    def event(frame: object, kind: str, argument: object) -> None:
        nonlocal count
        count += kind in ("call", "c_call")

    gc.disable()
    sys.setprofile(event)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


@pytest.mark.skipif(not SHARED.is_dir(), reason="pieces of public files do not lie in ../shared/data/formats")
def test_real_pieces_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    for name, (said, _, _) in TRACES.items():
        assert read_trace(SHARED / name)
        assert said in capsys.readouterr().err
    log = read_log(SHARED / "aiperf_with_warmup.jsonl")
    assert (len(log.requests), log.warm_ups) == (20, 5)
    for name, message in {
        "sglang2.jsonl": "expected one run, got 2",
        "vllm_bench_sweep_0.25.1_summary.json": "a summary of vllm bench",
        "guidellm_0.6.json": "GuideLLM's results: expected at least 10 requests",
        "inference_perf_per_request.json": "inference-perf's .*: expected at least 10 requests",
    }.items():
        with pytest.raises(TraceError, match=message):
            read_log(SHARED / name)


def test_an_unpacked_trace_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.csv.gz"
    monkeypatch.setattr(input_limit, "_limit", [4 << 20])
    text = VIDUR.encode() + b"\n" * (1 << 20)
    path.write_bytes(gzip.compress(text[: len(text) // 2]) + gzip.compress(text[len(text) // 2 :]))
    assert lengths(read_trace(path)) == TRACES["vidur.csv"][2]
    path.write_bytes(gzip.compress(text * 5))
    with pytest.raises(TraceError, match=r"expected at most 4 MiB \(--max-input-mib\), got more"):
        read_trace(path)
    path.write_bytes(gzip.compress(text)[:-9])
    with pytest.raises(TraceError, match="expected a whole gzip file"):
        read_trace(path)


def content(packed: bytes) -> bytes:
    return b"".join(input_limit.unpacked(io.BytesIO(packed)))


@given(st.lists(st.binary(max_size=100), min_size=1, max_size=4), st.integers(0, 20))
def test_members_of_a_gzip_file_are_unpacked_in_order(parts: list[bytes], padding: int) -> None:
    assert content(b"".join(map(gzip.compress, parts)) + b"\0" * padding) == b"".join(parts)


def test_what_a_member_of_a_gzip_file_leaves_is_copied_in_small_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rest of the file was copied for each: 300,000 members, 9 MB, took minutes."""
    given: list[int] = []

    class Counted:
        def __init__(self, wbits: int) -> None:
            self._member = zlib.decompressobj(wbits)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._member, name)

        def decompress(self, data: Any, most: int) -> bytes:
            given.append(len(data))
            return self._member.decompress(data, most)

    monkeypatch.setattr(input_limit, "zlib", SimpleNamespace(decompressobj=Counted))
    members = 10_000
    assert content(gzip.compress(b"a") * members) == b"a" * members
    assert len(given) < 1.01 * members  # one more at each end of what is read at once
    assert max(given) <= 16 << 10


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (",".join(f"c{n}" for n in range(5000)), "line 1: expected at most 4,096 columns, got 5,000"),
        (
            json.dumps({"timestamp": 0, "input_length": 9, "output_length": 3, "hash_ids": [1] * 1_000_001}),
            "line 1: hash_ids: expected at most 1,000,000 ids, got 1,000,001",
        ),
    ],
    ids=["columns", "ids"],
)
def test_a_trace_of_too_many_parts_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "t").write_text(text + "\n")
    with pytest.raises(TraceError, match=line):
        read_trace(tmp_path / "t")


OWN = b"arrival_s,input_tokens,output_tokens\n0,10,5\n"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("begin", "unit", "message"),
    [
        (OWN, b"1,", "line 3: expected a line of at most 8 MiB"),
        (OWN, b"x", "line 3: expected a line of at most 8 MiB"),
        (b"", b"a,", "line 1: expected a line of at most 8 MiB"),
        (OWN, b'"\n",', "expected a row of at most 8 MiB"),
        (OWN, b"1,2,3\n", "expected at most 262,144 values"),
        (b'{"a":1}\n', b'{"a":1}\n', "expected at most 262,144 values"),
        (b"[", b"{},", "expected at most 262,144 values"),
        (b'{"a":"' + b"x" * (8 << 20), b"x", "expected at most 16 MiB"),
    ],
    ids=["cells", "a cell", "columns", "lines of a row", "rows", "JSON lines", "objects", "a string"],
)
def test_a_trace_that_would_fill_the_memory_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool, begin: bytes, unit: bytes, message: str
) -> None:
    """A line of 900 MiB, packed into one, took 3 GB."""
    monkeypatch.setattr(input_limit, "_limit", [16 << 20])
    path = tmp_path / "t.csv"
    data = begin + unit * ((15 << 20) // len(unit))
    path.write_bytes(gzip.compress(data, 1) if packed else data)
    del data
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match=message):
            read_trace(path)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_end_as_people_have_them(tmp_path: Path, end: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(end.join(["", *VIDUR.split("\n")]).encode())
    assert lengths(read_trace(path)) == TRACES["vidur.csv"][2]


#: Texts that are no number of a trace, as they stand in its file.
NO_NUMBERS = (
    *("1e999", "-1e999", "nan", "inf", "1e308", "-1", "1" + "0" * 400, "1" + "0" * 5000, "true", "{}"),
    *('"x"', "[1]"),
)


@pytest.mark.parametrize("text", [*NO_NUMBERS, "1_0", "１２", "0x10", "1.5.2"])
@pytest.mark.parametrize("key", ["arrival_s", "input_tokens", "output_tokens"])
def test_a_cell_of_a_trace_that_is_no_number_is_named(tmp_path: Path, key: str, text: str) -> None:
    """An arrival of 1e308 was taken, and ended in a traceback."""
    cells = {"arrival_s": "1", "input_tokens": "10", "output_tokens": "5", key: text}
    path = tmp_path / "t.csv"
    path.write_text(f"{','.join(cells)}\n0,10,5\n{','.join(cells.values())}\n")
    got = re.escape(text.strip('"')[:20])
    with pytest.raises(TraceError, match=rf"^{path}: line 3: {key}: expected .*, got '{got}"):
        read_trace(path)


@pytest.mark.parametrize("text", NO_NUMBERS)
@pytest.mark.parametrize(
    ("first", "key"),
    [
        ({"arrival_s": 0, "input_tokens": 10, "output_tokens": 5}, "arrival_s"),
        ({"timestamp": 0, "input_length": 10, "output_length": 5, "hash_ids": [1]}, "timestamp"),
        ({"timestamp": 0, "input_length": 10, "output_length": 5, "hash_ids": [1]}, "input_length"),
        ({"arrival_ns": 0, "prompt_tokens": 10, "completion_tokens": 5}, "prompt_tokens"),
        ({"created": 1.7e9, "prompt_tokens": 10, "completion_tokens": 5}, "completion_tokens"),
    ],
)
def test_a_value_of_a_trace_that_is_no_number_is_named(
    tmp_path: Path, first: dict[str, Any], key: str, text: str
) -> None:
    """A whole number of 400 digits ended in a traceback."""
    path = tmp_path / "t.jsonl"
    fields = ", ".join(f'"{name}": {text if name == key else value}' for name, value in first.items())
    path.write_text(f"{json.dumps(first)}\n{{{fields}}}\n")
    if (key, text) == ("timestamp", "-1") or (key.endswith(("length", "tokens")) and text == "[1]"):
        assert len(read_trace(path)) == 2  # a clock may begin anywhere, and a list has its length
        return
    with pytest.raises(TraceError, match=rf"^{path}: line 2: ({key}: )?expected "):
        read_trace(path)

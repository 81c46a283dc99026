"""Readers of what others write: each with its bound, as its own module states it, and what happens there.

docs/reference/limits.md shows them; tests/fuzz/test_growth.py gives each n and 8 n bytes of its worst kinds.
"""

from __future__ import annotations

from typing import NamedTuple

from hetlb import files
from hetlb.balancer.admin import admin
from hetlb.balancer.clients import access, prompt_keys
from hetlb.balancer.engines import engine_metrics, scrape, upstream
from hetlb.balancer.http import http1, multipart, sse, transfer_fields
from hetlb.cli import adminclient
from hetlb.inputs import yaml_file
from hetlb.options.kubernetes import kubernetes
from hetlb.options.kv_events import kv_events, zmtp
from hetlb.options.peers import peer_messages, redis_transport
from hetlb.options.resume import continuation, progress
from hetlb.tools.models import expressions
from hetlb.tools.openai import answers
from hetlb.tools.stage import stage_messages
from hetlb.tools.workload import input_limit, record_file


class Reader(NamedTuple):
    """One reader: what it reads, of whom, its bound, and what happens there.

    `cases` are parts of the names of its growth tests. Of one without, JSON is decoded and no more.
    """

    reads: str
    of: str
    bound: str
    else_: str
    cases: tuple[str, ...]


def size(of: int) -> str:
    return f"{of >> 20} MiB" if of >= 1 << 20 else f"{of >> 10} KiB"


READERS = (
    Reader(
        "heads of requests",
        "a client",
        f"{size(http1.MAX_HEAD_BYTES)}, {size(http1.MAX_LINE_BYTES)} a line, {http1.MAX_HEADERS} headers",
        "431",
        ("a head", "blank lines", "pipelined requests", "requests whose heads differ"),
    ),
    Reader(
        "bodies",
        "a client",
        "`proxy.max_body_bytes`, one pass of JSON",
        "413",
        (
            "a body in",
            "chunk sizes",
            "unknown keys",
            "repeated keys",
            "lists",
            "token ids",
            "blanks",
            "digits",
            "empty strings",
            "UTF-8",
            "data urls",
            "pictures without end",
        ),
    ),
    Reader(
        "bodies that are written anew (an alias, a transfer field)",
        "a client",
        f"{size(transfer_fields.MAX_REWRITTEN_BYTES)} beside the prompt, or "
        f"{transfer_fields.MOST_QUOTES:,} quotation marks",
        "400",
        ("unknown keys",),
    ),
    Reader(
        "prompts with prefix keys",
        "a client",
        size(prompt_keys.MAX_KEYED_BYTES),
        "the rest has no keys",
        ("escaped quotes", "escaped backslashes", "commas of strings"),
    ),
    Reader(
        "forms",
        "a client",
        f"{multipart.MAX_PARTS} parts of {multipart.MAX_PART_LINES} headers in "
        f"{size(multipart.MAX_PART_HEAD_BYTES)}",
        "400",
        ("parts of a form", "headers of a part", "almost boundaries", "line ends in a file"),
    ),
    Reader("frames of a WebSocket", "a client or an engine", "passed on as they come", "-", ("tunnel",)),
    Reader(
        "heads of answers",
        "an engine",
        f"{size(http1.MAX_HEAD_BYTES)}, {upstream.MAX_INTERIM_ANSWERS} interim answers",
        "502",
        ("an answer's head", "an answer in chunks", "a plain answer", "interim answers"),
    ),
    Reader(
        "events of a stream",
        "an engine",
        f"{size(sse.MAX_HELD_BYTES)} of an event that is not whole",
        "it passes in parts, unread",
        ("tokens", "a stream in", "an event without end", "empty events", "events with errors"),
    ),
    Reader(
        "usage in a stream",
        "an engine",
        f"one event of {size(sse.MAX_HELD_BYTES)} is held",
        "later ones pass by themselves",
        ("events with usage", "events of usage"),
    ),
    Reader(
        "an answer that may go on elsewhere",
        "an engine",
        f"{size(progress.READ_BYTES)}, a body of {size(continuation.MAX_ASKED_BYTES)}",
        "it is not resumed",
        ("tokens of many events", "may go on"),
    ),
    Reader(
        "metrics page",
        "an engine",
        f"{size(scrape.MAX_METRICS_BYTES)}, {size(engine_metrics.MAX_LINE_BYTES)} a line, "
        f"{engine_metrics.MOST_SERIES:,} lines of a metric, {size(engine_metrics.MAX_LABEL_BYTES)} of labels",
        "that line is not read; of a larger page none, for a minute",
        ("metrics page",),
    ),
    Reader(
        "lists of models, versions, sleep, bootstrap pages",
        "an engine",
        size(upstream.MAX_PAGE_BYTES),
        "not read",
        ("a list of models",),
    ),
    Reader(
        "bodies at the admin listener",
        "an operator",
        size(admin.MAX_BODY_BYTES),
        "413",
        (),
    ),
    Reader(
        "answers of an admin listener, read by commands",
        "a server",
        f"{size(adminclient.MOST_ANSWER_BYTES)}, {size(adminclient.MOST_EVENT_BYTES)} an event",
        "one line",
        (),
    ),
    Reader(
        "reports of KV caches",
        "an engine",
        f"{size(zmtp.MAX_MESSAGE_BYTES)} a message, {size(kv_events.MOST_PUBLISHER_BYTES)} that wait",
        "the publisher is asked again from the start",
        ("blocks", "events of other kinds"),
    ),
    Reader(
        "watch of Kubernetes",
        "an API server",
        f"{size(kubernetes.MAX_LINE_BYTES)} a line, {size(kubernetes.MAX_PAGE_BYTES)} a page, "
        f"{size(kubernetes.MAX_OBJECTS_BYTES)} of objects",
        "the source has failed; its last list stays in force",
        ("line of a watch", "lines of a watch"),
    ),
    Reader(
        "answers of a name server",
        "a name server",
        "64 KiB, as DNS has it",
        "the source has failed; its last list stays in force",
        ("of a name server",),
    ),
    Reader(
        "files of instances, fleet files, profiles",
        "an operator",
        f"{size(yaml_file.MAX_FILE_BYTES)}, {yaml_file.MAX_VALUES:,} values in {yaml_file.MAX_LEVELS} levels",
        "one line",
        ("a file of", "comments of a file"),
    ),
    Reader(
        "files of requests",
        "an operator",
        f"`--max-input-mib` of bytes and of {input_limit.VALUE_BYTES} bytes a value, "
        f"{size(record_file.MOST_ROW)} a row of CSV, {size(files.MAX_BYTES)} a line of JSON or text",
        "one line",
        ("trace in",),
    ),
    Reader(
        "keys and certificates; other files read whole; headers of weights",
        "an operator",
        f"{size(access.MAX_SECRET_BYTES)} and 16 MiB; {size(files.MAX_BYTES)}; 95 MiB",
        "one line",
        (),
    ),
    Reader(
        "event logs",
        "an operator",
        f"one line is held, of at most {size(files.MAX_BYTES)}",
        "one line that names the place",
        ("lines of an event log",),
    ),
    Reader(
        "messages of peers over a hub or Valkey",
        "a peer",
        size(peer_messages.MAX_MESSAGE_BYTES),
        "the message is counted and dropped",
        ("of a peer", "keys of a lease", "too many changes", "messages that are none"),
    ),
    Reader(
        "replies of a Valkey or Redis server",
        "a server, or its clients",
        f"{size(peer_messages.MAX_MESSAGE_BYTES)}, {redis_transport._MAX_ITEMS} items, 64 KiB a line",
        "the connection is closed, and made anew",
        ("of a server of messages",),
    ),
    Reader(
        "frames of stages",
        "a stage or coordinator",
        f"{size(stage_messages.MAX_FRAME_BYTES)}, {stage_messages.MOST_PASSES:,} passes",
        "the connection is closed",
        ("of a stage", "passes"),
    ),
    Reader(
        "requests of Envoy",
        "Envoy",
        "`pick.buffer_bytes` of a body",
        "the call ends",
        ("of a gateway", "messages that change nothing", "messages of a byte"),
    ),
    Reader(
        "answers under `hetlb bench`",
        "a server",
        f"{size(answers.MAX_EVENT_BYTES)} an event",
        "a failed request",
        ("answers of a server",),
    ),
    Reader(
        "expressions of `quantization_config`",
        "a model's file",
        f"{expressions.MAX_CHARACTERS:,} characters, no look-around",
        "one line",
        ("expressions of a model",),
    ),
)

#: Modules that decode or read what others write, by the row of the table; "": text that hetlb itself wrote.
MODULES = {
    "bodies": "balancer/http/openai_body balancer/http/request_features",
    "bodies that are written anew (an alias, a transfer field)": "balancer/http/transfer_fields",
    "prompts with prefix keys": "balancer/clients/prompt_keys",
    "forms": "balancer/http/multipart",
    "heads of answers": "balancer/http/answer_form balancer/http/error_responses",
    "events of a stream": "balancer/http/sse",
    "an answer that may go on elsewhere": "options/resume/continuation options/resume/progress "
    "options/resume/resume_fields",
    "lists of models, versions, sleep, bootstrap pages": "served_models options/wake/doors "
    "options/split/kv_transfers",
    "bodies at the admin listener": "balancer/admin/changes balancer/fleet/service",
    "answers of an admin listener, read by commands": "cli/adminclient",
    "reports of KV caches": "options/kv_events/kv_events options/kv_events/zmtp",
    "watch of Kubernetes": "options/kubernetes/kubernetes",
    "files of instances, fleet files, profiles": "inputs/yaml_file balancer/config/profile_writer",
    "files of requests": "tools/workload/input_limit tools/workload/record_file tools/workload/trace_formats "
    "tools/loadtest/batch_files",
    "keys and certificates; other files read whole; headers of weights": "files watched_files "
    "balancer/clients/access balancer/clients/certificates balancer/config/fleet_parts "
    "options/pick/pick_server "
    "tools/models/weights_file tools/plan/throughput tools/profiler/sample_file tools/stage/stage_channel "
    "tools/stage/checkpoint tools/stage/text cli/stage",
    "event logs": "cli/request_files options/event_log/eventlog tools/paths/path_scheduler",
    "messages of peers over a hub or Valkey": "options/peers/peer_messages",
    "replies of a Valkey or Redis server": "options/peers/redis_transport",
    "frames of stages": "tools/stage/stage_messages",
    "requests of Envoy": "options/pick/messages",
    "answers under `hetlb bench`": "tools/openai/answers tools/openai/requests",
    "": "balancer/admin/dashboard/pages/__init__ cli/schema options/peers/control options/peers/supervisor "
    "options/peers/worker_service tools/loadtest/processes tools/models/config_keys "
    "tools/plan/common/plan_tables tools/plan/common/quantities",
}

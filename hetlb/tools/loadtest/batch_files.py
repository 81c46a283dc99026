"""Files of a batch: OpenAI's requests, and its results, which are the journal of the run.

A result is one line, written whole when its request has ended. A run that begins again keeps answers, and
refusals that another try would not change, and asks the rest again: broken ones, 3xx, 408, 429, 5xx.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from hetlb.errors import NOT_JSON, HetlbError, InputError, TraceError
from hetlb.files import content, opened
from hetlb.output_files import whole_file
from hetlb.tools.workload.input_limit import max_input_bytes, numbered_lines


class _Body(msgspec.Struct):
    model: str | None = None
    stream: bool | None = None


class BatchJob(msgspec.Struct):
    """One request of OpenAI's batch; `url` begins with `/v1/`, `body` is as in the file."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"
    model: str | None = None


def read_jobs(path: Path) -> list[BatchJob]:
    """Return the requests of a batch file. Raises `TraceError` naming the first line that cannot be sent."""
    jobs: dict[str, BatchJob] = {}
    for number, text in numbered_lines(path):
        where = f"{path}: line {number}"
        try:
            job = msgspec.json.decode(text, type=BatchJob)
            body = msgspec.json.decode(job.body, type=_Body)
        except NOT_JSON as error:
            raise TraceError(f"{where}: expected a request of OpenAI's batch: {error}") from error
        if job.method != "POST":
            raise TraceError(f"{where}: method: expected POST, got {job.method!r:.20}")
        if not job.url.startswith("/v1/") or not job.url.isascii() or not job.url.isprintable():
            raise TraceError(f"{where}: url: expected a path like /v1/chat/completions, got {job.url!r:.60}")
        if body.stream:
            raise TraceError(f"{where}: body.stream: expected false, as answers of a batch come whole")
        if jobs.setdefault(job.custom_id, job) is not job:
            raise TraceError(f"{where}: custom_id: expected each once, got {job.custom_id!r:.60} again")
        job.model = body.model
    if not jobs:
        raise TraceError(f"{path}: expected requests of OpenAI's batch, a line each, got none")
    return list(jobs.values())


#: Most characters of an error that the command prints.
_SHOWN_CHARACTERS = 200


class BatchJournal:
    """Results of a run. `ended`: the `custom_id`s that have one; `failed`: how many of these are errors.

    `first_error` is the first one of this run, with its request.
    """

    def __init__(self, path: Path, known: Collection[str]) -> None:
        self._path = path
        self.ended: set[str] = set()
        self.failed = 0
        self.first_error = ""
        self._file = self._opened()
        try:
            data = content(path, max_input_bytes())
            kept = b"".join([line + b"\n" for line in data.split(b"\n")[:-1] if self._keeps(line, known)])
            if data.startswith(kept):  # a line that was half written goes, on a full disk, too
                os.ftruncate(self._file, len(kept))
            else:
                with whole_file(path) as scratch:
                    scratch.write_bytes(kept)
                self.close()
                self._file = self._opened()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                problem = f"{path}: expected a file that can be written anew: {error.strerror}"
                raise InputError(problem) from error
            raise

    def _opened(self) -> int:
        try:
            file = opened(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"{self._path}: expected no other batch that writes to it") from error
        except OSError as error:
            raise InputError(f"{self._path}: expected a file to write to: {error.strerror}") from error
        return file

    def _keeps(self, line: bytes, known: Collection[str]) -> bool:
        """Take a line of an earlier run. Return True if it counts. Raises `TraceError` for other files."""
        try:
            result = msgspec.json.decode(line)
            name, response = result["custom_id"], result["response"]
            status = 500 if response is None else int(response["status_code"])
        except (*NOT_JSON, ValueError, LookupError, TypeError) as error:
            raise TraceError(f"{self._path}: expected results of a batch, got {line[:40]!r}") from error
        if name not in known:
            raise TraceError(f"{self._path}: custom_id: expected results of this batch, got {name!r:.60}")
        if name in self.ended or not is_final(status):
            return False
        self.ended.add(name)
        self.failed += status >= 300
        return True

    def answered(self, job: BatchJob, status: int, request_id: str, body: bytes) -> bool:
        """Write a server's response to the output file. Return False if it is an error."""
        good, raw = status < 300, body[:2000].decode(errors="replace")
        try:
            document: Any = msgspec.json.decode(body)
        except NOT_JSON:
            document = None
        if good and (not isinstance(document, dict) or document.get("error")):
            return self.broken(job, "malformed_answer", raw)
        response = {
            "status_code": status,
            "request_id": request_id,
            "body": raw if document is None else msgspec.Raw(body),
        }
        error = "" if good else f"status {status}: {_message(document) or raw}"
        self._write(job, {"response": response, "error": None}, error)
        return good

    def broken(self, job: BatchJob, code: str, message: str) -> bool:
        """Write that a request got no answer; False."""
        self._write(
            job, {"response": None, "error": {"code": code, "message": message}}, f"{code}: {message}"
        )
        return False

    def _write(self, job: BatchJob, ending: dict[str, Any], error: str) -> None:
        result = {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": job.custom_id, **ending}
        data = msgspec.json.encode(result) + b"\n"
        try:
            while data:  # in one write, but on a full disk
                data = data[os.write(self._file, data) :]
        except OSError as problem:
            raise HetlbError(f"{self._path}: a result could not be written: {problem.strerror}") from problem
        self.ended.add(job.custom_id)
        if error:
            self.failed += 1
            self.first_error = self.first_error or f"{job.custom_id}: {error[:_SHOWN_CHARACTERS]}"

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)


def _message(document: Any) -> str:
    """Return the message of an error in OpenAI's form, "" for another document."""
    error = document.get("error") if isinstance(document, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else ""


def is_final(status: int) -> bool:
    """Return True if another try would not change an answer of this status; a redirect is of a wrong URL."""
    return status < 500 and status not in (408, 429) and not 300 <= status < 400

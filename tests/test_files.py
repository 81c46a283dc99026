"""Output files: replaced as a whole, kept on failure, devices and links left what they are."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import zlib
from functools import partial
from pathlib import Path

import pytest

from hetlb.cli import request_files
from hetlb.cli.main import main
from hetlb.errors import ConfigError, InputError, ProfileError
from hetlb.files import content, expect_pipes, opened, read_bytes, read_text
from hetlb.output_files import whole_file, write_text
from hetlb.tools.plots import new_figure, save_figure
from hetlb.tools.workload.input_limit import text_lines


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("old")
    with whole_file(path) as scratch:
        scratch.write_text("new")
        assert path.read_text() == "old"
        assert scratch.suffix == ".yaml"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["fleet.yaml"]


def test_a_failure_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("old")
    with contextlib.suppress(RuntimeError), whole_file(path) as scratch:
        scratch.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["fleet.yaml"]


def test_the_target_of_a_link_is_replaced(tmp_path: Path) -> None:
    target, link = tmp_path / "target.yaml", tmp_path / "link.yaml"
    target.write_text("old")
    link.symlink_to(target)
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    path, read = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_text()))
    reader.start()
    write_text(path, "text")
    reader.join()
    assert read == ["text"]
    assert path.is_fifo()


@pytest.mark.parametrize("command", ["batch", "simulate", "serve"])
def test_a_link_that_leads_in_a_circle_is_one_line(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`hetlb batch` ended with a traceback."""
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    words = {
        "batch": ["batch", str(loop), str(tmp_path / "out"), "--url", "http://127.0.0.1:9"],
        "simulate": ["simulate", "--event-log", str(loop)],
        "serve": ["serve", "--check", "--config", str(loop)],
    }
    assert main(words[command]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"{loop}: expected a readable file: Too many levels of symbolic links" in line


def test_a_result_replaces_a_link_that_leads_in_a_circle(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    write_text(loop, "new")
    assert loop.read_text() == "new"


@pytest.mark.parametrize("device", [True, False])
def test_an_event_log_of_one_endless_line_is_one_line(
    tmp_path: Path, device: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sparse file, or `/dev/zero`, was read into memory until that was full."""
    monkeypatch.setattr(request_files, "text_lines", partial(text_lines, most=1 << 20))
    path = Path("/dev/zero")
    if not device:
        path = tmp_path / "log"
        path.touch()
        os.truncate(path, 4 << 30)
    assert main(["simulate", "--event-log", str(path)]) == 2
    assert "line 1: expected a line of at most 1 MiB, got a longer one" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ConfigError, ProfileError])
@pytest.mark.parametrize("where", ["missing/f.yaml", "file/f.yaml", "folder"])
def test_one_line_names_the_path(tmp_path: Path, error: type[InputError], where: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(error, match=rf"^{tmp_path / where}: expected a place to write to: \w+"):
        write_text(tmp_path / where, "", error)


def test_a_picture_below_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="--plot: expected a picture file that can be written"):
        save_figure(new_figure(1, 1), tmp_path / "file" / "p.png")


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"PAR1\x15\x04", "text, got a Parquet file: write it as JSON lines first"),
        (zlib.compress(b"x", wbits=31), "text, got a gzip file: unpack it first"),
        (b"\x28\xb5\x2f\xfd\x00", "text, got a Zstandard file: unpack it first"),
        (b"PK\x03\x04\x14", "text, got a zip archive: unpack it first"),
        ("a,b".encode("utf-16"), "UTF-8 text, got UTF-16: save it as UTF-8"),
    ],
)
def test_what_is_no_text_is_called_by_its_name(tmp_path: Path, data: bytes, kind: str) -> None:
    (tmp_path / "f").write_bytes(data)
    with pytest.raises(ProfileError, match=f"expected {kind}"):
        read_text(tmp_path / "f", ProfileError)


def test_what_is_no_regular_file_is_one_line_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for path, kind in [
            (tmp_path / "fifo", r"a pipe \(FIFO\)"),
            (tmp_path / "folder", "a folder"),
            (tmp_path / "socket", "a socket"),
            (Path("/dev/zero"), "a device"),
        ]:
            with pytest.raises(
                InputError, match=f"^{path}: expected a readable file: not a regular .* {kind}$"
            ):
                read_bytes(path, InputError)
            with pytest.raises(OSError, match="not a regular file"):
                opened(path, os.O_WRONLY | os.O_CREAT)


def test_a_file_that_becomes_a_pipe_after_the_look_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "fifo")
    regular = os.stat(__file__)
    monkeypatch.setattr(os, "stat", lambda path: regular)
    with pytest.raises(OSError, match="not a regular file"):
        opened(tmp_path / "fifo")


def test_a_file_is_bounded_whether_its_size_is_known_or_not(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * 2048)
    assert read_bytes(path, InputError, 2048) == b"x" * 2048
    with pytest.raises(InputError, match=r"f: expected a readable file: larger than 1 KiB"):
        read_bytes(path, InputError, 1024)
    assert b"Name:" in read_bytes(Path("/proc/self/status"), InputError)
    with pytest.raises(InputError, match="larger than 0 KiB"):
        read_bytes(Path("/proc/self/status"), InputError, 100)


def test_a_pipe_of_the_command_line_is_read_once_and_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    expect_pipes([path])
    writer = threading.Thread(target=path.write_bytes, args=(b"text",))
    writer.start()
    assert content(path) == b"text"
    writer.join()
    assert content(path) == b"text"  # not waited for again
    expect_pipes([])
    with pytest.raises(OSError, match="not a regular file"):
        content(path)

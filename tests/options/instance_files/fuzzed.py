"""Files of instances, as a fuzzer and the tests of growth give them."""

from __future__ import annotations

import contextlib

from fuzz.costs import Make, Reader, many
from yaml import YAMLError

from hetlb.inputs.mistakes import mistakes_in
from hetlb.inputs.yaml_file import _Builder
from hetlb.options.instance_files.file_source import InstanceFile


def yaml(data: bytes) -> None:
    """A file of instances: its plain data, and its mistakes."""
    with contextlib.suppress(YAMLError, UnicodeDecodeError):
        mistakes_in(_Builder(data.decode()).build(), InstanceFile)


def merges(size: int) -> bytes:
    """A mapping that merges as many others, half of it keys of its own."""
    keys = b"".join(b"k%d: 1\n" % number for number in range(size // 18))
    return many(b"*a,", b"a: &a {}\n<<: [", b"]\n" + keys)(size)


PREFIXES: tuple[tuple[Reader, bytes], ...] = ((yaml, b""), (yaml, b"models: ["))
#: name -> (reader, input of a size, the smaller size).
GROWTH: dict[str, tuple[Reader, Make, int]] = {
    "a file of instances": (
        yaml, many(b"  - {url: 'http://h:1', weight: 2}\n", b"models:\n- name: m\n  instances:\n"),
        64 << 10,
    ),
    "a file of mistakes": (yaml, many(b"{},", b"models: [", b"]"), 32 << 10),
    "a file of anchors": (yaml, many(b"- &a x\n- *a\n", b"models:\n"), 64 << 10),
    "a file of merges": (yaml, merges, 32 << 10),
    "a file of lists": (yaml, many(b"[],", b"models: [", b"]"), 32 << 10),
    "a file of one key": (yaml, many(b"x ", b"models: '", b"'"), 512 << 10),
    "comments of a file": (yaml, many(b"# x\n"), 256 << 10),
}  # fmt: skip

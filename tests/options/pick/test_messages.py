"""The descriptor is what the proto file says, and what gateways of the Gateway API send is understood."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

import hetlb.options.pick
from hetlb.options.pick import messages

FOLDER = Path(hetlb.options.pick.__file__).parent


def test_compiling_the_proto_again_gives_the_same(tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc", reason="needs grpcio-tools")
    out = f"--descriptor_set_out={tmp_path / 'again'}"
    assert protoc.main(["protoc", f"-I{FOLDER}", out, str(FOLDER / "ext_proc.proto")]) == 0
    read = descriptor_pb2.FileDescriptorSet.FromString
    assert read((tmp_path / "again").read_bytes()) == read((FOLDER / "ext_proc.binpb").read_bytes())


def test_fields_that_are_not_known_are_no_error() -> None:
    """Envoy's messages have more fields than are read here, and will get others."""
    request = messages.ProcessingRequest()
    request.request_body.body = b"{}"
    unknown = request.SerializeToString() + bytes([(15 << 3) | 2, 3]) + b"abc"
    assert messages.ProcessingRequest.FromString(unknown).request_body.body == b"{}"


def test_an_immediate_answer_holds_status_headers_and_body() -> None:
    raw = messages.immediate(429, [("retry-after", b"1")], b"{}", "hetlb")
    answer = messages.ProcessingResponse.FromString(raw).immediate_response
    assert (answer.status.code, answer.body) == (429, b"{}")
    assert [(each.header.key, each.header.raw_value) for each in answer.headers.set_headers] == [
        ("retry-after", b"1")
    ]

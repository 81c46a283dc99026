"""Frames: whatever is written is read back, anything else is one error; large passes are divided."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetlb.tools.stage import stage_channel as auth
from hetlb.tools.stage.stage_messages import (
    MOST_PASSES,
    Cause,
    Close,
    Lost,
    Opening,
    Pass,
    Passes,
    RouteHop,
    Sampling,
    StageProtocolError,
    Token,
    Tokens,
    Welcome,
    decode,
    encode,
    frames,
)

OPENING = Opening((RouteHop("http://a:1", 0, 7), RouteHop("http://b:1", 7, 12)), Sampling(3, temperature=0.5))
WELCOME = Welcome("m", "float32", 0, 7, 100, 8, 64, [(0.0, 0.0), (8.0, 0.1)], [(0.0, 0.0), (1.0, 0.1)])


@pytest.mark.parametrize(
    "message",
    [
        Passes([Pass(1 << 63, 0, 0, 3, True, OPENING), Pass(7, 1, 3, 1, True)]),
        Close([1, 2]),
        Tokens([Token(5, 9, 17), Token(6, 1, 0, [(0, -0.5)])]),
        Lost([3], Cause.REQUEST, "why"),
        WELCOME,
    ],
)
def test_messages_come_back(message: object) -> None:
    found, payload = decode(encode(message, b"ab", b"cd"))  # type: ignore[arg-type]
    assert found == message
    assert bytes(payload) == b"abcd"


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 0.5])
def test_a_log_probability_is_a_finite_number(value: float) -> None:
    frame = encode(Tokens([Token(6, 1, 0, [(0, value)])]))
    with pytest.raises(StageProtocolError, match=r"\$"):
        decode(frame)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_error(frame: bytes) -> None:
    with contextlib.suppress(StageProtocolError):
        decode(frame)


@given(st.integers(0, 80), st.binary(max_size=4))
def test_a_cut_or_changed_frame_is_an_error_or_a_message(cut: int, other: bytes) -> None:
    frame = encode(Passes([Pass(1, 0, 0, 3, True, OPENING)]), b"x" * 12)
    with contextlib.suppress(StageProtocolError):
        decode(frame[:cut] + other + frame[cut + len(other) :])


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=10), st.integers(8, 200))
def test_passes_are_divided_and_lose_nothing(parts: list[tuple[int, bool]], split: int) -> None:
    made = [
        (Pass(i, 0, 5, count, last, OPENING), bytes([i % 256]) * (8 * count))
        for i, (count, last) in enumerate(parts)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetlb.tools.stage.stage_messages.SPLIT_BYTES", split)
        patch.setattr("hetlb.tools.stage.stage_messages.MOST_PASSES", 3)
        sent = list(frames(made))
    found: dict[int, list[tuple[Pass, bytes]]] = {}
    for frame in sent:
        message, rows = decode(frame)
        assert isinstance(message, Passes)
        assert len(rows) <= max(split, 8)
        assert len(message.passes) <= 3
        at = 0
        for each in message.passes:
            found.setdefault(each.lease, []).append((each, bytes(rows[at : at + 8 * each.count])))
            at += 8 * each.count
        assert at == len(rows)
    for i, (whole, data) in enumerate(made):
        pieces = found[i]
        assert b"".join(rows for _, rows in pieces) == data
        position = whole.position
        for n, (piece, _) in enumerate(pieces):
            assert piece.position == position
            assert piece.last == (whole.last and n == len(pieces) - 1)
            assert (piece.opening is not None) == (n == 0)
            position += piece.count


def test_proofs_depend_on_everything() -> None:
    proofs = {
        auth.stage_proof(b"k", b"a", b"b"),
        auth.stage_proof(b"k", b"b", b"a"),
        auth.stage_proof(b"k", b"ab", b""),
        auth.stage_proof(b"l", b"a", b"b"),
        auth.client_proof(b"k", b"a", b"b", 0),
        auth.client_proof(b"k", b"a", b"b", 1),
    }
    assert len(proofs) == 6


@pytest.mark.parametrize(
    "message",
    [
        Passes([Pass(1, 0, 0, 1, True)] * (MOST_PASSES + 1)),
        Passes([Pass(1, 0, 0, 0, True)]),
        Passes([Pass(1, 0, 1 << 30, 1, True)]),
        Passes([Pass(1, 0, 0, 1, True, Opening(OPENING.route * 200, Sampling(1)))]),
        Passes([Pass(1, 0, 0, 1, True, Opening(OPENING.route, Sampling(1, temperature=float("nan"))))]),
        Passes([Pass(1, 0, 0, 1, True, Opening(OPENING.route, Sampling(1, temperature=float("inf"))))]),
        Close([1] * (MOST_PASSES + 1)),
        Lost([1], Cause.PATH, "x" * 2000),
        msgspec.structs.replace(WELCOME, prompt_times=[(0.0, float("nan")), (1.0, 1.0)]),
    ],
)
def test_what_is_beyond_a_limit_is_refused(message: object) -> None:
    with pytest.raises(StageProtocolError):
        decode(encode(message))  # type: ignore[arg-type]


def test_a_challenge_is_good_for_one_connection_and_one_session() -> None:
    challenges = auth.Challenges(b"k")

    def headers(session: int) -> dict[str, str]:
        nonce = auth.new_nonce()
        found = auth.challenge(challenges.issue(auth.hello(session, nonce)))
        assert found is not None
        stage_nonce, proof = found
        assert proof == auth.stage_proof(b"k", nonce, stage_nonce)
        mine = auth.client_proof(b"k", nonce, stage_nonce, session)
        return auth.hello(session, nonce) | auth.proof_headers(stage_nonce, mine)

    good = headers(7)
    assert challenges.session(good) == 7
    for bad in (good, headers(7) | {"x-hetlb-session": "8"}, headers(7) | {"origin": "http://page"}):
        with pytest.raises(auth.NotProven):
            challenges.session(bad)
    with pytest.raises(auth.NotProven):
        challenges.issue({})
    assert challenges.session(auth.hello(7, auth.new_nonce())) is None


@given(st.dictionaries(st.sampled_from(["x-hetlb-session", "x-hetlb-nonce", "x-hetlb-proof"]), st.text()))
def test_any_headers_are_refused_or_no_proof(headers: dict[str, str]) -> None:
    with contextlib.suppress(auth.NotProven):
        assert auth.Challenges(b"k").session(headers) is None

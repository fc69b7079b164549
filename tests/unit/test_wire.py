"""Frames: every kind survives the wire, nothing else is taken, and limits hold."""

from collections.abc import Callable
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdnode.core import wire
from tests.support.link_frames import SAMPLES

FRAMES = [frame for samples in SAMPLES.values() for frame in samples.values()]


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: wire.tag(frame))
def test_every_kind_survives(frame: wire.Frame) -> None:
    assert wire.decode(wire.encode(frame)) == frame


def test_tags_are_unique_and_lower_case() -> None:
    tags = [wire.tag(frame) for frame in SAMPLES[next(iter(SAMPLES))].values()]
    assert len(set(tags)) == len(tags) == len(get_args(wire.Frame))
    assert all(tag == tag.lower() for tag in tags)


def packed(*fields: object) -> bytes:
    return msgspec.msgpack.encode(list(fields))


NONCE = b"n" * 32


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "bad frame: "),
        (b"\xc1", "bad frame: "),
        (packed(), "bad frame: "),
        (packed("no_such_kind"), "no_such_kind"),
        (packed("auth", "d", "decode"), "bad frame: "),
        (packed("auth", "d", "decode", b"short"), "bad frame: "),
        (packed("auth", "", "decode", NONCE), "bad frame: "),
        (packed("auth", "d" * 256, "decode", NONCE), "bad frame: "),
        (packed("auth", "d", 7, NONCE), "bad frame: "),
        (packed("auth_proof", b"m" * 33), "bad frame: "),
        (packed("session_offer", "b", b"t" * 16, []), "bad frame: "),
        (packed("session_offer", "b", b"t" * 15, [[0, "n", b"e"]]), "bad frame: "),
        (packed("refuse", ["x"] * 33), "bad frame: "),
        (packed("accepted", "k", -1), "bad frame: "),
        (packed("regrant", "k", 1 << 32), "bad frame: "),
        (packed("progress", "k", 1, float("nan"), 0.0), "bad frame: "),
        (packed("progress", "k", 1, float("inf"), 0.0), "bad frame: "),
        (packed("progress", "k", 1, -0.5, 0.0), "bad frame: "),
        (packed("nic_down", [0, 1, 2], "x"), "bad frame: "),
        (packed("nic_down", [0, 70000], "x"), "bad frame: "),
        (b"\x91" * 100_000, "bad frame: "),  # arrays in arrays
        (b"\xdd\xff\xff\xff\xff", "bad frame: "),  # an array of four thousand million
        (b"x" * (wire.MAX_FRAME_BYTES + 1), "frame of 4194305 bytes, at most 4194304 are taken"),
    ],
)
def test_what_is_not_taken(data: bytes, text: str) -> None:
    with pytest.raises(wire.WireError) as caught:
        wire.decode(data)
    assert text in str(caught.value)


def test_fields_that_a_later_version_adds_are_passed_over() -> None:
    assert wire.decode(packed("nic_down", [1, 2], "", "new", 7)) == wire.NicDown((1, 2), "")


def test_a_dispatch_of_an_older_node_has_no_trace() -> None:
    old = packed("dispatch", "k", "r", [1], [[0, 1]], 0, 1 << 20, -1, 1.0, 0, "off")
    frame = wire.decode(old)
    assert isinstance(frame, wire.Dispatch)
    assert frame.traceparent == ""
    new = packed("dispatch", "k", "r", [1], [[0, 1]], 0, 1 << 20, -1, 1.0, 0, "off", "t" * 65)
    with pytest.raises(wire.WireError, match="bad frame"):
        wire.decode(new)


@given(st.binary(max_size=200))
def test_random_bytes_give_a_frame_or_a_wire_error(data: bytes) -> None:
    try:
        frame = wire.decode(data)
    except wire.WireError:
        return
    assert isinstance(frame, wire.Message)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("two\nlines\x1b[31m\x00 end", "two lines [31m end"),
        ("ü [x]", "ü [x]"),
        ("y" * 2000, "y" * 999 + "…"),
    ],
)
def test_clip(text: str, shown: str) -> None:
    assert wire.clip(text) == shown


def test_a_clipped_text_is_taken_by_the_peer() -> None:
    text = wire.clip("\n".join(["🙂" * 3000, "end"]))
    assert wire.decode(wire.encode(wire.Bye(text))) == wire.Bye(text)


@pytest.mark.parametrize(
    ("frame", "most"),
    [
        (lambda n: packed("dispatch", "k", "r", [1] * n, [], 0, 0, -1, 1.0, 0), wire.MAX_TOKENS),
        (
            lambda n: packed("dispatch", "k", "r", [], [[0, 1]] * n, 0, 0, -1, 1.0, 0),
            wire.MAX_RUNS,
        ),
        (lambda n: packed("dispatch", "k", "r" * n, [], [], 0, 0, -1, 1.0, 0), wire.MAX_TEXT),
        (
            lambda n: packed("session_ready", "b", [[-1, [[0, 0, 0, 0, 0]] * n]]),
            wire.MAX_PIECES,
        ),
    ],
    ids=["tokens", "pages", "request_id", "pieces"],
)
def test_what_is_long_in_a_frame_has_a_limit(frame: Callable[[int], bytes], most: int) -> None:
    assert isinstance(wire.decode(frame(most)), wire.Message)
    with pytest.raises(wire.WireError, match=f"length <= {most}"):
        wire.decode(frame(most + 1))


@pytest.mark.parametrize("vocabulary", [1 << 16, 1 << 18])
def test_a_frame_has_room_for_the_longest_prompt_in_the_worst_pages(vocabulary: int) -> None:
    most = wire.most_tokens(vocabulary)
    frame = wire.Dispatch(
        "k" * 255, "🙂" * wire.MAX_TEXT, [vocabulary - 1] * most,
        [wire.PageRun(1 << 20, 1 << 20)] * wire.MAX_RUNS, 0, (1 << 32) - 1, -1, 1e9, 1 << 40,
        "v" * 16, "t" * 64, 1 << 40,
    )  # fmt: skip
    assert wire.decode(wire.encode(frame)) == frame
    assert most >= 1 << 19

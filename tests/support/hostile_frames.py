"""Frames that a peer might send by mistake or on purpose, drawn from a seed."""

import random
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from pdnode.core import wire
from pdnode.core.transfer import FailCause
from pdnode.types import Role
from tests.support.link_frames import frames_of

KEPT = 64
STRANGE: tuple[object, ...] = (
    0,
    -1,
    1,
    255,
    2**31,
    2**32 - 1,
    2**53,
    2**63 - 1,
    2**64 - 1,
    -(2**63),
    0.0,
    -1.5,
    1e308,
    float("nan"),
    float("inf"),
    None,
    True,
    "",
    "auth",
    "\x1b[31m\r\nreq=1",
    "x" * 300,
    "y" * 20_000,
    b"",
    b"\xff" * 64,
    [],
    [[]],
    [0] * 200,
    {},
    {"a": {"b": []}},
)


class HostileFrames:
    """What a node of `role` and `boot` sends. `keys`: of dispatches that the other side knows;
    `decode_boot`: what such keys begin with. `session_token`: of the link that there is now.
    """

    def __init__(self, role: Role, *, boot: str, pages: int, seed: str) -> None:
        self.keys: deque[str] = deque(maxlen=KEPT)
        self.replayed: deque[bytes] = deque(maxlen=KEPT)
        self._draw = random.Random(seed)
        self._role = role
        self._boot = boot
        self.decode_boot = boot
        self.session_token = bytes(wire.SESSION_TOKEN_BYTES)
        self._pages = pages
        self._number = 0
        self._samples = tuple(frames_of(role).values())
        own = (
            (self._dispatch, self._forged_dispatch, self._cancel, self._regrant, self._nic_fenced)
            if role is Role.DECODE
            else (
                self._accepted,
                self._progress,
                self._sent,
                self._failed,
                self._drained,
                self._nic_down,
            )
        )
        self._in_place: Sequence[Callable[[], wire.Frame]] = (*own, *own, self._drain)

    def harmless(self) -> bytes:
        """A frame of a kind that this node may send in a session that is up; lies, most of them."""
        return self._kept(wire.encode(self._draw.choice(self._in_place)()))

    def any(self) -> bytes:
        """Anything: another kind, a mutated frame, a replay, rubbish, rarely an oversized one."""
        draw = self._draw
        chance = draw.random()
        if chance < 0.1:
            return self._kept(wire.encode(self._nic_up()))
        if chance < 0.3:
            return self._kept(wire.encode(draw.choice(self._samples)))
        if chance < 0.6:
            return self._bent()
        if chance < 0.8 and self.replayed:
            return draw.choice(self.replayed)
        if chance < 0.99:
            return self._damaged()
        if chance < 0.995:
            return wire.encode(self._bloated())
        return draw.randbytes(8) * ((wire.MAX_FRAME_BYTES >> 3) + draw.randrange(2))

    def _kept(self, data: bytes) -> bytes:
        if len(data) < 1 << 16:
            self.replayed.append(data)
        return data

    def _bent(self) -> bytes:
        """A frame one field of which, at any depth, has a strange value."""
        frame = self._draw.choice((self._draw.choice(self._samples), self._own()))
        fields = msgspec.msgpack.decode(wire.encode(frame))
        place = fields
        while True:
            index = self._draw.randrange(len(place))
            if isinstance(place[index], list) and place[index] and self._draw.random() < 0.7:
                place = place[index]
                continue
            place[index] = self._draw.choice(STRANGE)
            break
        if self._draw.random() < 0.1:
            fields.append(self._draw.choice(STRANGE))
        return msgspec.msgpack.encode(fields)[: wire.MAX_FRAME_BYTES]

    def _damaged(self) -> bytes:
        """Bytes of a frame: some changed, lost, doubled, or of no frame at all."""
        draw = self._draw
        data = bytearray(wire.encode(draw.choice((draw.choice(self._samples), self._own()))))
        match draw.randrange(5):
            case 0:
                for _ in range(draw.randrange(1, 8)):
                    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            case 1:
                del data[draw.randrange(len(data)) :]
            case 2:
                place = draw.randrange(len(data))
                data[place:place] = draw.randbytes(draw.randrange(1, 64))
            case 3:
                data += bytes(data)
            case _:
                data = bytearray(draw.randbytes(draw.randrange(200)))
        return bytes(data)

    # frames of the right kind

    def _own(self) -> wire.Frame:
        return self._draw.choice(self._in_place)()

    def _any_key(self) -> str:
        """A known one, one that was never given out, or one that is none."""
        draw = self._draw
        if self.keys and draw.random() < 0.7:
            return draw.choice(self.keys)
        return f"{self.decode_boot}:{draw.choice(('', '0', '-1', 'x' * 200, 2**70))}"

    def _immediate(self) -> int:
        draw = self._draw
        good = draw.randrange(1, 4096) << 20 | draw.randrange(256) << 12
        return draw.choice((good, good, good, 0, 1, 0xFFFFF, 2**32 - 1))

    def _pair(self) -> tuple[int, int]:
        return self._draw.choice(((0, 0), (0, 1), (1, 0), (63, 64), (65535, 65535)))

    def _dispatch(self) -> wire.Dispatch:
        """One that is right in every field."""
        draw = self._draw
        tokens = draw.choice((1, 16, 17, 40, 200))
        needed = -(-tokens // 16)
        start = draw.randrange(self._pages - needed + 1)
        self._number += 1
        key = f"{self._boot}:{self._number}"
        self.keys.append(key)
        return wire.Dispatch(
            key=key,
            request_id=draw.choice(("r", "x" * 900, "\x1b[2J")),
            tokens=[draw.randrange(3, 300) for _ in range(tokens)],
            pages=[wire.PageRun(start, needed)],
            first_page=0,
            immediate=draw.randrange(1, 4096) << 20,
            context_slot=-1,
            deadline_s=draw.choice((0.0, 1e-9, 5.0, 1e9)),
            priority=draw.choice((0, -(2**63), 2**63 - 1)),
        )

    def _forged_dispatch(self) -> wire.Dispatch:
        draw, pages = self._draw, self._pages
        change: dict[str, object] = draw.choice(
            (
                {"pages": [wire.PageRun(pages, 1)]},
                {"pages": [wire.PageRun(2**63, 1)]},
                {"pages": [wire.PageRun(0, 2**63)]},
                {"pages": [wire.PageRun(0, 1)] * 100},
                {"pages": []},
                {"tokens": []},
                {"tokens": [2**64 - 1]},
                {"tokens": [5] * 100_000},
                {"first_page": 2**63},
                {"context_slot": 0},
                {"verify": "thrice"},
                {"verify": "once"},
                {"group": 1},
                {"group": 2**63},
                {"immediate": self._immediate()},
                {"key": self._any_key()},
            )
        )
        return msgspec.structs.replace(self._dispatch(), **change)

    def _bloated(self) -> wire.Frame:
        """One that is as large as a frame may be, or names another incarnation."""
        draw = self._draw
        most = wire.MAX_FRAME_BYTES - 4000
        if self._role is Role.PREFILL:
            change: dict[str, object] = draw.choice(
                ({"text": "t" * most}, {"pairs": [(1, 1)] * 300}, {"key": f"{self._boot}x:1"})
            )
            return msgspec.structs.replace(self._failed(), **change)
        change = draw.choice(
            (
                {"verify": "v" * most},
                {"request_id": "r" * most},
                {"tokens": [5] * most},
                {"pages": [wire.PageRun(0, 1)] * (most // 4)},
                {"key": f"{self._boot}x:1"},
                {"key": "k" * most},
            )
        )
        return msgspec.structs.replace(self._dispatch(), **change)

    def _cancel(self) -> wire.Cancel:
        return wire.Cancel(self._any_key())

    def _regrant(self) -> wire.Regrant:
        return wire.Regrant(self._any_key(), self._immediate())

    def _nic_fenced(self) -> wire.NicFenced:
        return wire.NicFenced(self._draw.choice(((0, 1), (1, 0), (7, 7), (65535, 65535))))

    def _accepted(self) -> wire.Accepted:
        return wire.Accepted(self._any_key(), self._draw.choice((0, 1, 2**63, 2**64 - 1)))

    def _progress(self) -> wire.Progress:
        draw = self._draw
        tokens = draw.choice((0, 1, 100, 2**64 - 1))
        return wire.Progress(self._any_key(), tokens, draw.choice((0.0, 1e9)), 1e9)

    def _sent(self) -> wire.Sent:
        draw = self._draw
        chunk, size = draw.choice((0, 1, 2**63)), draw.choice((1, 7, 8, 80, 1 << 20))
        return wire.Sent(self._any_key(), chunk, draw.randbytes(size))

    def _failed(self) -> wire.Failed:
        draw = self._draw
        cause = draw.choice((*FailCause, "made up", "\n"))
        pairs = draw.choice(([], [(1, 1)], [(n, n) for n in range(256)]))
        return wire.Failed(self._any_key(), cause, draw.choice(("", "t" * 16_000)), pairs)

    def _drained(self) -> wire.Drained:
        return wire.Drained(self._any_key(), 1e9, 0.0)

    def _nic_down(self) -> wire.NicDown:
        return wire.NicDown(self._draw.choice(((0, 1), (1, 0), (65535, 65535))), "\x00" * 16_000)

    def _nic_up(self) -> wire.NicUp:
        """With the right token, most of them; a connection that is up, or one that never was."""
        sample = frames_of(self._role)[wire.NicUp]
        assert isinstance(sample, wire.NicUp)
        token = self.session_token if self._draw.random() < 0.8 else sample.token
        return msgspec.structs.replace(sample, pair=self._pair(), token=token)

    def _drain(self) -> wire.Frame:
        return self._draw.choice((wire.Drain(), wire.Undrain(), wire.Undrain()))

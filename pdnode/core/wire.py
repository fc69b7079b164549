"""Messages of the peer link: msgspec structs, MessagePack arrays tagged by name, no pickle.

Who sends what, in the order of a session (D decode node, P prefill node; D opens the WebSocket):

    D Auth → P AuthReply → D AuthProof            HMAC both ways (core/link.py)
    D Hello → P Hello                             compared field by field, Refuse names what differs
    P SessionOffer → D SessionAnswer → P SessionReady
    both Probed                                   the session is up
    D Dispatch, Cancel, Regrant, NicFenced        P Accepted, Progress, Sent, Failed, Drained,
                                                    NicDown
    D TestWrites                                  P TestWritten
    both Heartbeat, Drain, Undrain, NicUp, Bye

Only durations travel, never clock readings. A frame is at most `MAX_FRAME_BYTES`.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

PROTOCOL_MIN = 1
PROTOCOL_MAX = 1
MAX_FRAME_BYTES = 4 << 20

# What may arrive, checked while decoding; encoding checks nothing. Text that is logged or shown
# goes through `clip` first.
MAX_TEXT = 1000
MAX_REASONS = 32
MAX_NICS = 64
MAX_PAIRS = 256
MAX_RANKS = 1024
MAX_DIGESTS_BYTES = 1 << 20  # of one Sent
MAX_TOKENS = 1 << 20  # of a prompt
MAX_RUNS = 1 << 16  # of pages of a prompt
MAX_PIECES = 1 << 14  # registrations of a region, over all NICs
MAX_TEST_PAGES = 256
MAX_TEST_PASSES = 1 << 20
NONCE_BYTES = 32
SESSION_TOKEN_BYTES = 16
Name = Annotated[str, Meta(min_length=1, max_length=255)]
Text = Annotated[str, Meta(max_length=16 * MAX_TEXT)]
ShortText = Annotated[str, Meta(max_length=MAX_TEXT)]
Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Mac = Annotated[bytes, Meta(max_length=32)]  # empty: no token is configured there
SessionToken = Annotated[
    bytes, Meta(min_length=SESSION_TOKEN_BYTES, max_length=SESSION_TOKEN_BYTES)
]
Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]  # refuses NaN and infinity as well
Nic = Annotated[int, Meta(ge=0, le=65535)]
Rank = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
Pair = tuple[Nic, Nic]


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=False):
    """Base of all frames."""


class Auth(Message, frozen=True, tag="auth"):
    node: Name
    role: Name
    nonce: Nonce


class AuthReply(Message, frozen=True, tag="auth_reply"):
    node: Name
    role: Name
    nonce: Nonce
    mac: Mac


class AuthProof(Message, frozen=True, tag="auth_proof"):
    mac: Mac


class Geometry(msgspec.Struct, frozen=True, array_like=True):
    """Wire form of core.geometry.KvGeometry; checked before it becomes one."""

    kind: Name
    layers: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: Name
    tp: int
    pages: Natural  # of each group
    dp: int = 1  # TP groups of the node: ranks are numbered group by group


class Hello(Message, frozen=True, tag="hello"):
    node: Name
    boot: Name
    role: Name
    protocol_min: Natural
    protocol_max: Natural
    pdnode_version: Name
    model: Name
    fingerprint: Name
    geometry: Geometry
    context_tokens: Natural  # longest sequence this node takes
    provider: Name
    libfabric: Name
    byte_order: Name = "little"


class Refuse(Message, frozen=True, tag="refuse"):
    """The session cannot be; `reasons` name field, value here and value there. Then close."""

    reasons: Annotated[list[Text], Meta(max_length=MAX_REASONS)]


class NicAddress(msgspec.Struct, frozen=True, array_like=True):
    """How a NIC is reached: `endpoint` is host:port (FI_EP_MSG) or an opaque name (RDM)."""

    nic: Nic
    name: Name
    endpoint: Annotated[bytes, Meta(max_length=512)]
    # of its device group, whose memory it is for; numbered as in RegionDescriptor; empty: all
    ranks: Annotated[list[Rank], Meta(max_length=MAX_RANKS)] = []


class RegionPiece(msgspec.Struct, frozen=True, array_like=True):
    """One registration of a region with one NIC; `base` is what the writer adds its offset to."""

    nic: Nic
    offset: Natural
    length: Natural
    base: Natural
    key: Natural


class RegionDescriptor(msgspec.Struct, frozen=True, array_like=True):
    """A region that this peer may write to: of rank `group * tp + rank of the group`.

    `rank` -1 is the 4 KiB scratch region for probes.
    """

    rank: Annotated[int, Meta(ge=-1, lt=MAX_RANKS)]
    pieces: Annotated[list[RegionPiece], Meta(max_length=MAX_PIECES)]


class SessionOffer(Message, frozen=True, tag="session_offer"):
    boot: Name
    token: SessionToken  # 16 random bytes, for the connection data
    nics: Annotated[list[NicAddress], Meta(min_length=1, max_length=MAX_NICS)]


class SessionAnswer(Message, frozen=True, tag="session_answer"):
    boot: Name
    nics: Annotated[list[NicAddress], Meta(min_length=1, max_length=MAX_NICS)]
    pairs: Annotated[
        list[Pair], Meta(min_length=1, max_length=MAX_PAIRS)
    ]  # (decode NIC, prefill NIC): one connection each
    regions: Annotated[list[RegionDescriptor], Meta(min_length=1, max_length=MAX_RANKS + 1)]


class SessionReady(Message, frozen=True, tag="session_ready"):
    boot: Name
    regions: Annotated[
        list[RegionDescriptor], Meta(min_length=1, max_length=MAX_RANKS + 1)
    ]  # the prefill node's scratch region only


class Probed(Message, frozen=True, tag="probed"):
    """My probe writes over every pair came back with success."""

    boot: Name


class PageRun(msgspec.Struct, frozen=True, array_like=True):
    start: Natural
    count: Positive


class Dispatch(Message, frozen=True, tag="dispatch"):
    """Compute the KV of `tokens` (the prompt without its last token) and push it."""

    key: Name
    request_id: ShortText  # the client's x-request-id, for both logs
    tokens: Annotated[list[Natural], Meta(max_length=MAX_TOKENS)]
    pages: Annotated[
        list[PageRun], Meta(max_length=MAX_RUNS)
    ]  # destination pages, the same list for all ranks of the TP group
    first_page: (
        Natural  # index into `pages` of the first one wanted; 0 until there is a prefix cache
    )
    immediate: Annotated[int, Meta(ge=0, lt=1 << 32)]  # slot << 20 | generation << 12, weight 0
    context_slot: int  # -1: no context wanted
    deadline_s: Seconds  # without progress for so long, the decode node gives up
    priority: int
    # types.Verify; else Sent follows for every page, before Drained
    verify: Annotated[str, Meta(max_length=16)] = "off"
    traceparent: Annotated[str, Meta(max_length=64)] = ""  # W3C, of the client, for both logs
    group: Natural = 0  # the decode node's TP group that owns the request: `pages` are its pages


class Accepted(Message, frozen=True, tag="accepted"):
    key: Name
    position: Natural  # requests ahead of this one in the prefill queue


class Progress(Message, frozen=True, tag="progress"):
    key: Name
    computed_tokens: Natural
    queue_s: Seconds  # how long it waited in the queue
    prefill_s: Seconds  # since its first pass began


class Sent(Message, frozen=True, tag="sent"):
    """Digests of computed pages, in the order of the dispatch's pages (core/digests.py)."""

    key: Name
    first: Natural  # index of the first of these pages
    digests: Annotated[bytes, Meta(min_length=1, max_length=MAX_DIGESTS_BYTES)]


class Failed(Message, frozen=True, tag="failed"):
    """The prefill gives the request up, at once; `drained` follows when nothing can land any more.

    `pairs`: connections (decode NIC, prefill NIC) whose writes came back with an error. They may
    still land, so the decode node fences each and answers NicFenced. May be empty.
    """

    key: Name
    cause: Name  # core.transfer.FailCause value
    text: Text
    pairs: Annotated[list[Pair], Meta(max_length=MAX_PAIRS)]


class Cancel(Message, frozen=True, tag="cancel"):
    key: Name


class Drained(Message, frozen=True, tag="drained"):
    """No write of this request is outstanding, and every one came back with success."""

    key: Name
    queue_s: Seconds
    prefill_s: Seconds


class NicDown(Message, frozen=True, tag="nic_down"):
    """Writes over this pair failed or stalled: fence it on your side, then answer NicFenced.

    All pairs on the wire are (decode NIC, prefill NIC).
    """

    pair: Pair
    cause: Text


class NicFenced(Message, frozen=True, tag="nic_fenced"):
    """`regions`: ranks that lost their last NIC with this pair, with further NICs of the session
    that they are registered with now."""

    pair: Pair
    regions: Annotated[list[RegionDescriptor], Meta(max_length=MAX_RANKS)] = []


class NicUp(Message, frozen=True, tag="nic_up"):
    """A NIC is back: connect this pair anew (regions are those of `regions`, with new keys)."""

    pair: Pair
    nic: NicAddress
    token: SessionToken
    regions: Annotated[list[RegionDescriptor], Meta(min_length=1, max_length=MAX_RANKS + 1)]


class Regrant(Message, frozen=True, tag="regrant"):
    """Replay all writes of the request under this new immediate, over the NICs that are left."""

    key: Name
    immediate: Annotated[int, Meta(ge=0, lt=1 << 32)]


class TestWrites(Message, frozen=True, tag="test_writes"):
    """Write `length` bytes of each of these pages over this pair, `passes` times; `serial`: one
    write after the other. For `pdnode fabric-test`; what is written means nothing."""

    key: Name
    pair: Pair
    immediate: Annotated[int, Meta(ge=0, lt=1 << 32)]
    pages: Annotated[list[PageRun], Meta(min_length=1, max_length=MAX_TEST_PAGES)]
    passes: Annotated[int, Meta(ge=1, le=MAX_TEST_PASSES)]
    length: Positive
    serial: bool
    rank: Rank = 0  # whose pages they are; one that the decode NIC is for


class TestWritten(Message, frozen=True, tag="test_written"):
    """`seconds`: of each write, or of all of them; `cause`: why not all came back with success;
    `clean`: nothing of it can land any more."""

    key: Name
    seconds: Annotated[list[Seconds], Meta(max_length=MAX_TEST_PAGES)]
    cause: Text
    clean: bool
    mtu: Natural  # of the interface behind the prefill NIC; 0: not known


class Drain(Message, frozen=True, tag="drain"):
    """Send me no new dispatch; what was accepted is finished."""


class Undrain(Message, frozen=True, tag="undrain"):
    pass


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """Sent by the control loop every `heartbeat_s`; counters show that loop and core move."""

    boot: Name
    sequence: Positive
    echo: Natural  # sequence of the peer's last heartbeat
    echo_delay_s: Seconds  # how long ago that one arrived here
    steps: Natural  # passes finished since start
    step_busy: bool  # a pass is running or due
    core: Natural  # progress-thread loop turns since start
    waiting_tokens: Natural  # prompt tokens queued here
    free_pages: Natural


class Bye(Message, frozen=True, tag="bye"):
    """I close the session on purpose."""

    text: Text


Frame = (
    Auth
    | AuthReply
    | AuthProof
    | Hello
    | Refuse
    | SessionOffer
    | SessionAnswer
    | SessionReady
    | Probed
    | Dispatch
    | Accepted
    | Progress
    | Sent
    | Failed
    | Cancel
    | Drained
    | NicDown
    | NicFenced
    | NicUp
    | Regrant
    | TestWrites
    | TestWritten
    | Drain
    | Undrain
    | Heartbeat
    | Bye
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


class WireError(Exception):
    """A frame that is too large, not MessagePack, of an unknown kind, or ill-typed."""


def clip(text: str) -> str:
    """`text` fit for the wire, a log line and a screen: one printable line of at most MAX_TEXT."""
    shown = "".join(letter if letter.isprintable() else " " for letter in text[: 4 * MAX_TEXT])
    shown = " ".join(shown.split())
    return shown if len(shown) <= MAX_TEXT else shown[: MAX_TEXT - 1] + "…"


def most_tokens(vocabulary: int) -> int:
    """Of a prompt of ids below `vocabulary` that a Dispatch has room for, whatever its pages."""
    number_bytes = 3 if vocabulary <= 1 << 16 else 5
    run_bytes = 1 + 2 * 5
    others_bytes = 8 * MAX_TEXT
    room = MAX_FRAME_BYTES - MAX_RUNS * run_bytes - others_bytes
    return min(MAX_TOKENS, room // number_bytes)


def tag(frame: Message) -> str:
    """Name of a frame's kind on the wire."""
    name = frame.__struct_config__.tag
    assert isinstance(name, str)
    return name


def encode(frame: Frame) -> bytes:
    data = _encoder.encode(frame)
    assert len(data) <= MAX_FRAME_BYTES, f"{type(frame).__name__} of {len(data)} bytes"
    return data


def decode(data: bytes) -> Frame:
    if len(data) > MAX_FRAME_BYTES:
        raise WireError(f"frame of {len(data)} bytes, at most {MAX_FRAME_BYTES} are taken")
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise WireError(f"bad frame: {error}") from error

"""Stop strings and detokenizing, token by token, without HTTP."""

from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdnode.api.text import Assembler, StopScanner
from pdnode.core.request import TokenEvent
from tests.support.fake_service import END, BytesCodec


def scan(parts: list[str], stops: tuple[str, ...]) -> tuple[list[str], bool]:
    """What came out per part, the rest included, and whether a stop string was found."""
    scanner = StopScanner(stops)
    out: list[str] = []
    for part in parts:
        shown, stopped = scanner.push(part, armed=True)
        out.append(shown)
        if stopped:
            return out, True
    return [*out, scanner.flush()], False


def first_stop(text: str, stops: tuple[str, ...]) -> int | None:
    """Where `text` ends, character by character: the naive model."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return None


@settings(max_examples=400, deadline=None)
@given(
    text=st.text("abc", max_size=24),
    cuts=st.lists(st.integers(0, 24), max_size=8),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
)
@example(text="abcd", cuts=[], stops=["abcd", "bc"])
@example(text="aab", cuts=[1, 2], stops=["ab"])
def test_where_the_text_is_cut_does_not_matter(
    text: str, cuts: list[int], stops: list[str]
) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    out, stopped = scan([text[a:b] for a, b in pairwise(edges)], tuple(stops))
    end = first_stop(text, tuple(stops))
    assert stopped == (end is not None)
    assert "".join(out) == text[:end]


def test_the_beginning_of_a_stop_string_never_gets_out() -> None:
    out, stopped = scan(["Hello", "\n", "\nUs", "er", ":", " x"], ("\n\nUser:",))
    assert stopped
    assert out == ["Hello", "", "", "", ""]


def test_text_is_held_only_while_it_may_become_a_stop_string() -> None:
    out, stopped = scan(["ab", "ab", "x"], ("abac",))
    assert not stopped
    assert out == ["", "ab", "abx", ""]


def test_matches_before_min_tokens_are_passed_over() -> None:
    assembler = Assembler(BytesCodec(), ("b",), min_tokens=3)
    pieces = [assembler.push(TokenEvent(byte, 0.0, None)) for byte in b"abab"]
    assert [piece.text for piece in pieces] == ["a", "b", "a", ""]
    assert [piece.finish for piece in pieces] == [None, None, None, "stop"]
    assert assembler.tokens == 4


def test_a_stop_string_begun_before_min_tokens_may_end_after_it() -> None:
    assembler = Assembler(BytesCodec(), ("abc", "b"), min_tokens=3)
    pieces = [assembler.push(TokenEvent(byte, 0.0, None)) for byte in b"abc"]
    assert [piece.text for piece in pieces] == ["", "", ""]
    assert pieces[-1].finish == "stop"


def test_characters_over_token_edges() -> None:
    text = "né 日本 😀!"
    data = text.encode()
    assembler = Assembler(BytesCodec(), (), min_tokens=0)
    pieces = [
        assembler.push(TokenEvent(byte, 0.0, "length" if at == len(data) - 1 else None))
        for at, byte in enumerate(data)
    ]
    assert "".join(piece.text for piece in pieces) == text
    assert all("\ufffd" not in piece.text for piece in pieces)
    assert len(pieces) == len(data)  # one per token, empty while a character is not complete
    assert pieces[1].text == ""


def test_an_unfinished_character_at_the_end_is_replaced() -> None:
    assembler = Assembler(BytesCodec(), (), min_tokens=0)
    assert assembler.push(TokenEvent("é".encode()[0], 0.0, "length")).text == "\ufffd"


def test_the_text_of_a_stop_token_is_not_shown_and_held_text_is() -> None:
    for last in (END, ord("z")):
        assembler = Assembler(BytesCodec(), ("hix",), min_tokens=0)
        texts = [assembler.push(TokenEvent(byte, 0.0, None)).text for byte in b"hi"]
        piece = assembler.push(TokenEvent(last, 0.0, "stop"))
        assert texts == ["", ""]
        assert piece[:3] == ("hi", "stop", (last,))
        assert assembler.tokens == 3


def test_a_stop_string_inside_one_token() -> None:
    assembler = Assembler(BytesCodec({260: b"yes. no"}), (".",), min_tokens=0)
    assert assembler.push(TokenEvent(260, 0.0, "length"))[:3] == ("yes", "stop", (260,))


def test_an_unfinished_character_belongs_to_the_token_that_began_it() -> None:
    """Offsets of 'a', half an 'é', 'b', 'é' in two parts, half a character more and a stop."""
    data = b"a\xc3b\xc3\xa9\xc3"
    assembler = Assembler(BytesCodec(), (), min_tokens=0)
    pieces = [assembler.push(TokenEvent(byte, 0.0, None)) for byte in data]
    pieces.append(assembler.push(TokenEvent(ord("z"), 0.0, "stop")))
    assert "".join(piece.text for piece in pieces) == "a\ufffdbé\ufffd"
    offsets = [entry.offset for piece in pieces for entry in piece.entries]
    assert offsets == [0, 1, 2, 3, 3, 4, 4]

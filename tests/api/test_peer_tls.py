"""Mutual TLS on the peer link: who gets in, what the two sides say, new certificates."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from pdnode.api.peer import MAX_UNPROVED, PeerDialer, PeerListener
from pdnode.config import PeerConfig
from pdnode.peertls import PeerTls, TlsError, load_tls
from tests.support.certificates import Authority, encrypt

FAST = PeerConfig(port=0, connect_timeout_s=5.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder, "ca")


@pytest.fixture(scope="module")
def stranger(folder: Path) -> PeerTls:
    other = Authority(folder, "other-ca")
    return load(other.sign("stranger"), other)


@pytest.fixture(scope="module")
def known(authority: Authority) -> PeerTls:
    return load(authority.sign("known"), authority)


def load(pair: tuple[Path, Path], authority: Authority) -> PeerTls:
    certificate, key = map(str, pair)
    return load_tls(certificate=certificate, key=key, ca=str(authority.path))


@asynccontextmanager
async def listening(tls: PeerTls | None) -> AsyncIterator[tuple[PeerListener, int]]:
    """Answers every frame with itself."""

    async def echo(link) -> None:  # noqa: ANN001
        link.proved()
        while (data := await link.receive()) is not None:
            link.send(data)

    listener = PeerListener(replace(FAST, tls=tls), echo)
    _, port = await listener.start()
    try:
        yield listener, port
    finally:
        await listener.stop()


async def exchange(port: int, tls: PeerTls | None, host: str = "127.0.0.1") -> bytes | str:
    """What comes back for a frame, or why nothing does."""
    dialer = PeerDialer(replace(FAST, tls=tls))
    try:
        link = await dialer.dial(host, port)
        link.send(b"hello")
        data = await link.receive()
        link.close("done")
        await link.wait_closed()
        return link.cause if data is None else data
    except OSError as error:
        return str(error)
    finally:
        await dialer.close()


async def test_two_that_one_authority_has_signed(known: PeerTls, authority: Authority) -> None:
    async with listening(known) as (_, port):
        assert await exchange(port, load(authority.sign("second"), authority)) == b"hello"


async def test_a_client_without_or_with_a_strange_certificate(
    known: PeerTls, stranger: PeerTls
) -> None:
    async with listening(known) as (_, port):
        assert "SSLCertVerificationError" in str(await exchange(port, stranger))
        accepting = ssl.create_default_context()
        accepting.check_hostname, accepting.verify_mode = False, ssl.CERT_NONE
        for one in (replace(stranger, dial=accepting), None):
            answer = await exchange(port, one)
            assert isinstance(answer, str)
            assert answer


async def test_a_server_of_another_name_is_refused_by_name(authority: Authority) -> None:
    elsewhere = load(authority.sign("elsewhere", "DNS:elsewhere.example"), authority)
    async with listening(elsewhere) as (_, port):
        answer = await exchange(port, elsewhere)
    assert "IP address mismatch" in str(answer), answer


async def test_a_plain_server_is_no_tls_server(known: PeerTls) -> None:
    async with listening(None) as (_, port):
        assert "TLS" in str(await exchange(port, known))


async def test_new_certificates_hold_for_new_links(
    known: PeerTls, stranger: PeerTls, folder: Path
) -> None:
    """An authority is replaced: the old peers stay connected and do not come back."""
    async with listening(known) as (listener, port):
        dialer = PeerDialer(replace(FAST, tls=known))
        old = await dialer.dial("127.0.0.1", port)
        listener.reload(replace(FAST, tls=stranger))
        assert isinstance(await exchange(port, known), str)
        assert await exchange(port, stranger) == b"hello"
        old.send(b"still here")
        assert await old.receive() == b"still here"
        dialer.reload(replace(FAST, tls=stranger))
        new = await dialer.dial("127.0.0.1", port)
        new.send(b"again")
        assert await new.receive() == b"again"
        await dialer.close()


async def test_handshakes_that_are_never_finished_are_bounded(known: PeerTls) -> None:
    async with listening(known) as (listener, port):
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_UNPROVED)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        assert listener.turned_away == 1
        for _, one in [*idle, (reader, writer)]:
            one.close()
        async with asyncio.timeout(10):
            while await exchange(port, known) != b"hello":
                await asyncio.sleep(0.01)


def test_what_cannot_be_used_is_named(authority: Authority, folder: Path) -> None:
    certificate, key = authority.sign("mine")
    _, other_key = authority.sign("another")
    empty = folder / "empty.pem"
    empty.write_text("nothing\n")
    cases = {
        "tls_certificate": (certificate, other_key, authority.path),
        "tls_ca": (certificate, key, empty),
        "tls_key": (certificate, encrypt(key), authority.path),
    }
    for name, (chain, private, ca) in cases.items():
        with pytest.raises(TlsError) as caught:
            load_tls(certificate=str(chain), key=str(private), ca=str(ca))
        assert caught.value.key == name
    key.chmod(0o644)
    with pytest.raises(TlsError, match="mode 0644"):
        load_tls(certificate=str(certificate), key=str(key), ca=str(authority.path))
    key.chmod(0o600)


def test_equal_files_are_equal(authority: Authority) -> None:
    pair = authority.sign("same")
    assert load(pair, authority) == load(pair, authority)
    assert load(pair, authority) != load(authority.sign("same"), authority)

"""The certificates of the peer link, as `[peer] tls_*` names them: mutual TLS 1.3."""

import hashlib
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pdnode.secretfile import SecretError, read_file

MAX_PEM_BYTES = 1 << 20


class TlsError(Exception):
    """`key` of [peer] is wrong; the text says how."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key = key


@dataclass(frozen=True, slots=True)
class PeerTls:
    """Two are equal if the files were. A connection keeps the context that it began with."""

    digest: bytes
    accept: ssl.SSLContext = field(compare=False, repr=False)  # of a prefill node
    dial: ssl.SSLContext = field(compare=False, repr=False)  # of a decode node


def load_tls(*, certificate: str, key: str, ca: str) -> PeerTls:
    """From three credentials in PEM. TlsError names the one that cannot be used.

    A peer must show a certificate that `ca` has signed; a decode node also compares the host of
    its [[prefill]] address with the certificate's names.
    """
    chain_path, chain = _read("tls_certificate", certificate, secret=False)
    key_path, private = _read("tls_key", key, secret=True)
    _, authorities = _read("tls_ca", ca, secret=False)
    contexts = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(cadata=authorities.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise TlsError("tls_ca", "holds no certificate in PEM that can be used") from error
        try:
            context.load_cert_chain(chain_path, key_path, password=_no_password)
        except ssl.SSLError as error:
            text = f"the certificate and tls_key do not go together: {error.reason or error}"
            raise TlsError("tls_certificate", text) from error
        contexts.append(context)
    digest = hashlib.sha256()
    for data in (chain, private, authorities):
        digest.update(hashlib.sha256(data).digest())
    return PeerTls(digest.digest(), *contexts)


def names_of(certificate: Mapping[str, Any]) -> frozenset[str]:
    """DNS names and common name of a certificate, as `ssl.SSLSocket.getpeercert` gives it."""
    names = {value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"}
    for part in certificate.get("subject", ()):
        names |= {value for kind, value in part if kind == "commonName"}
    return frozenset(names)


def _read(key: str, credential: str, *, secret: bool) -> tuple[str, bytes]:
    try:
        path, data = read_file(credential, secret=secret, most=MAX_PEM_BYTES)
    except SecretError as error:
        raise TlsError(key, str(error)) from error
    return str(path), data


def _no_password() -> str:
    raise TlsError("tls_key", "is encrypted; a daemon has nobody to ask for the password")

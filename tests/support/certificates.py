"""Certificates for tests, made by openssl: an authority, and who it has signed."""

import subprocess
from pathlib import Path

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=30)


class Authority:
    """A certificate that signs others; all of it lies in `folder`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f"{name}.pem"
        self._folder = folder
        self._key = folder / f"{name}.key"
        _openssl(
            "req", "-x509", *_NEW_KEY, "-nodes", "-keyout", str(self._key), "-days", "2",
            "-subj", f"/CN={name}", "-out", str(self.path),
        )  # fmt: skip

    def sign(self, name: str, subject: str = "IP:127.0.0.1") -> tuple[Path, Path]:
        """(certificate, key) for an address or a host name (`DNS:…`)."""
        request, chain = self._folder / f"{name}.csr", self._folder / f"{name}.pem"
        key, extensions = self._folder / f"{name}.key", self._folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={subject}\nextendedKeyUsage=serverAuth,clientAuth\n")
        _openssl(
            "req", "-new", *_NEW_KEY, "-nodes", "-keyout", str(key), "-subj", f"/CN={name}",
            "-out", str(request),
        )  # fmt: skip
        _openssl(
            "x509", "-req", "-in", str(request), "-CA", str(self.path), "-CAkey", str(self._key),
            "-CAcreateserial", "-days", "2", "-extfile", str(extensions), "-out", str(chain),
        )  # fmt: skip
        key.chmod(0o600)
        return chain, key


def encrypt(key: Path) -> Path:
    """The same key under a password."""
    found = key.with_suffix(".encrypted")
    _openssl("ec", "-in", str(key), "-aes128", "-passout", "pass:secret", "-out", str(found))
    found.chmod(0o600)
    return found

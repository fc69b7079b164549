"""Secrets are files, never values of the configuration."""

import os
import stat
from pathlib import Path

MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4096


class SecretError(Exception):
    """The text says what is wrong with the credential; never what is in it."""


def read_secret(credential: str) -> bytes:
    """The secret named by `credential`, without the newline at its end.

    A plain name is looked up in $CREDENTIALS_DIRECTORY, where systemd puts what LoadCredential
    names and guards it itself. An absolute path must be a file that only its owner may read.
    """
    if credential.startswith("/"):
        return _read(Path(credential), own=True)
    if "/" in credential or credential in (".", ".."):
        raise SecretError("expected a plain name or an absolute path")
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    if not directory:
        raise SecretError(
            f'"{credential}" is looked up in $CREDENTIALS_DIRECTORY, which is not set; start the '
            "node with systemd's LoadCredential, or give an absolute path"
        )
    return _read(Path(directory) / credential, own=False)


def _read(path: Path, *, own: bool) -> bytes:
    try:
        # Not blocking: opening a FIFO must not hang the start.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise SecretError(f"{path} cannot be read: {error.strerror}") from error
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise SecretError(f"{path} is not a regular file")
        mode = stat.S_IMODE(status.st_mode)
        if own and mode & 0o077:
            raise SecretError(f"{path} has mode {mode:04o}; only 0600 or less is taken")
        data = file.read(MAX_SECRET_BYTES + 1).rstrip(b"\r\n")
    if not MIN_SECRET_BYTES <= len(data) <= MAX_SECRET_BYTES:
        raise SecretError(
            f"{path} holds a secret of {min(len(data), MAX_SECRET_BYTES + 1)} bytes; "
            f"{MIN_SECRET_BYTES}..{MAX_SECRET_BYTES} are taken"
        )
    return data

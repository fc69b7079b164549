"""Secrets are files, never values of the configuration."""

import os
import re
import stat
from pathlib import Path

MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4096
MAX_KEYS = 64
MAX_KEY_BYTES = 512
MAX_KEYS_BYTES = 64 << 10
_KEY = re.compile(rb"[\x21-\x7e]{%d,%d}" % (MIN_SECRET_BYTES, MAX_KEY_BYTES))


class SecretError(Exception):
    """The text says what is wrong with the credential; never what is in it."""


def read_secret(credential: str) -> bytes:
    """The secret named by `credential`, without the newline at its end.

    A plain name is looked up in $CREDENTIALS_DIRECTORY, where systemd puts what LoadCredential
    names and guards it itself. An absolute path must be a file that only its owner may read.
    """
    path, data = read_file(credential, secret=True, most=MAX_SECRET_BYTES + 1)
    data = data.rstrip(b"\r\n")
    if not MIN_SECRET_BYTES <= len(data) <= MAX_SECRET_BYTES:
        raise SecretError(
            f"{path} holds a secret of {min(len(data), MAX_SECRET_BYTES + 1)} bytes; "
            f"{MIN_SECRET_BYTES}..{MAX_SECRET_BYTES} are taken"
        )
    return data


def read_keys(credential: str) -> tuple[bytes, ...]:
    """The API keys of a credential: one a line; empty lines and those that begin with # are not."""
    path, data = read_file(credential, secret=True, most=MAX_KEYS_BYTES)
    lines = [line.strip() for line in data.splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith(b"#"))
    if not 1 <= len(keys) <= MAX_KEYS:
        raise SecretError(f"{path} has {len(keys)} keys; 1..{MAX_KEYS} are taken, one a line")
    for number, key in enumerate(keys, start=1):
        if not _KEY.fullmatch(key):
            raise SecretError(
                f"{path}: key {number} is not {MIN_SECRET_BYTES}..{MAX_KEY_BYTES} printable "
                "characters without spaces"
            )
    return keys


def read_file(credential: str, *, secret: bool, most: int) -> tuple[Path, bytes]:
    """The file that `credential` names, and at most `most` bytes of it. SecretError in words.

    `secret`: an absolute path must be a file that only its owner may read.
    """
    if credential.startswith("/"):
        path = Path(credential)
        return path, _read(path, guarded=secret, most=most)
    if "/" in credential or credential in (".", ".."):
        raise SecretError("expected a plain name or an absolute path")
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    if not directory:
        raise SecretError(
            f'"{credential}" is looked up in $CREDENTIALS_DIRECTORY, which is not set; start the '
            "node with systemd's LoadCredential, or give an absolute path"
        )
    path = Path(directory) / credential
    return path, _read(path, guarded=False, most=most)


def _read(path: Path, *, guarded: bool, most: int) -> bytes:
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
        if guarded and mode & 0o077:
            raise SecretError(f"{path} has mode {mode:04o}; only 0600 or less is taken")
        return file.read(most)

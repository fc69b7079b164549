"""Kinds of configuration values: each reads one TOML value and says what it allows.

`read` returns the value as it is kept in memory, or raises BadValue with what is expected instead.
A bool is never taken for a number, a number never for a string.
"""

import ipaddress
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

_UNITS = {"B": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}
_SIZE = re.compile(r"(\d{1,19})([A-Za-z]+)")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252})")
AUTO_WORD = "auto"


class BadValue(ValueError):
    """The text completes "KEY: "; it names what is allowed and what was given."""


class HostPort(NamedTuple):
    host: str  # without brackets
    port: int


class Kind(Protocol):
    @property
    def allowed(self) -> str:
        """What may be written, for documents and errors."""

    def read(self, raw: object) -> object: ...


def shown(raw: object) -> str:
    """`raw` as an error shows it, cut to a sane length."""
    if isinstance(raw, bool):
        return "true" if raw else "false"
    if isinstance(raw, str):
        return f'"{raw}"' if len(raw) <= 80 else f'"{raw[:80]}…"'
    if isinstance(raw, int | float):
        return repr(raw) if not isinstance(raw, int) or abs(raw) < 10**20 else "a huge number"
    if isinstance(raw, list | tuple):
        return f"[{', '.join(map(shown, raw))}]" if len(raw) <= 8 else "an array"
    return "a table" if isinstance(raw, dict) else "a date or time"


def _wrong(kind: Kind, raw: object) -> BadValue:
    return BadValue(f"expected {kind.allowed}, got {shown(raw)}")


def parse_size(text: str) -> int:
    """Bytes of "64GiB". Units are B, KiB, MiB, GiB and TiB; "64G" and "64GB" are refused."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise BadValue(f'expected a size such as 1048576 or "64GiB", got {shown(text)}')
    number, unit = match.groups()
    if unit not in _UNITS:
        raise BadValue(f'unknown unit "{unit}" in {shown(text)}; use B, KiB, MiB, GiB or TiB')
    return int(number) << _UNITS[unit]


def format_size(size_bytes: int) -> str:
    """The shortest exact form that `parse_size` reads."""
    for unit, shift in reversed(_UNITS.items()):
        if size_bytes and size_bytes % (1 << shift) == 0:
            return f"{size_bytes >> shift}{unit}"
    return f"{size_bytes}B"


def parse_host_port(text: str) -> HostPort:
    """Host and port of "host:port"; an IPv6 address stands in brackets. Port 0..65535."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or len(port) > 5:
        raise BadValue(f'expected "host:port", got {shown(text)}')
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise BadValue(f"{shown(host)} is not an IPv6 address") from None
    elif ":" in host:
        raise BadValue(f'an IPv6 address stands in brackets: "[{host}]:{port}"')
    elif not _HOST.fullmatch(host):
        raise BadValue(f'{shown(host)} is not a host name or address in "host:port"')
    if int(port) > 65535:
        raise BadValue(f"port {port} is outside 0..65535")
    return HostPort(host, int(port))


@dataclass(frozen=True, slots=True)
class Text:
    """A string of at most `most` characters; `pattern` must match all of it."""

    pattern: str = r"[^\x00-\x1f\x7f]*"
    allowed: str = "a string"
    most: int = 255

    def read(self, raw: object) -> object:
        if not isinstance(raw, str) or len(raw) > self.most or not re.fullmatch(self.pattern, raw):
            raise _wrong(self, raw)
        return raw


@dataclass(frozen=True, slots=True)
class Names:
    """An array of at most `most` names, or patterns for names, read as a tuple."""

    most: int = 64
    patterns: bool = True

    @property
    def allowed(self) -> str:
        return f"an array of at most {self.most} names" + ", with * and ?" * self.patterns

    def read(self, raw: object) -> object:
        if not isinstance(raw, list | tuple) or len(raw) > self.most:
            raise _wrong(self, raw)
        allowed = r"[\w.:*?\-]{1,64}" if self.patterns else r"[\w.:\-]{1,64}"
        for name in raw:
            if not isinstance(name, str) or not re.fullmatch(allowed, name, re.ASCII):
                raise _wrong(self, name)
        return tuple(raw)


@dataclass(frozen=True, slots=True)
class Choice:
    options: tuple[str, ...]

    @property
    def allowed(self) -> str:
        return "one of " + ", ".join(f'"{option}"' for option in self.options)

    def read(self, raw: object) -> object:
        if not isinstance(raw, str) or raw not in self.options:
            raise _wrong(self, raw)
        return raw


@dataclass(frozen=True, slots=True)
class Flag:
    allowed: str = "true or false"

    def read(self, raw: object) -> object:
        if not isinstance(raw, bool):
            raise _wrong(self, raw)
        return raw


@dataclass(frozen=True, slots=True)
class Integer:
    """With `auto`, the word "auto" is read as 0."""

    low: int
    high: int
    auto: bool = False

    @property
    def allowed(self) -> str:
        return f"an integer {self.low}..{self.high}" + (' or "auto"' if self.auto else "")

    def read(self, raw: object) -> object:
        if self.auto and raw == AUTO_WORD:
            return 0
        if not isinstance(raw, int) or isinstance(raw, bool) or not self.low <= raw <= self.high:
            raise _wrong(self, raw)
        return raw


@dataclass(frozen=True, slots=True)
class Number:
    low: float
    high: float

    @property
    def allowed(self) -> str:
        return f"a number {self.low:g}..{self.high:g}"

    def read(self, raw: object) -> object:
        if not isinstance(raw, int | float) or isinstance(raw, bool) or math.isnan(raw):
            raise _wrong(self, raw)
        if not self.low <= raw <= self.high:
            raise _wrong(self, raw)
        return float(raw)


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes, as an integer or as text with a binary unit. With `auto`, "auto" is read as 0."""

    low: int
    high: int
    auto: bool = False

    @property
    def allowed(self) -> str:
        bounds = f'"{format_size(self.low)}".."{format_size(self.high)}"'
        return f"a size {bounds}" + (' or "auto"' if self.auto else "")

    def read(self, raw: object) -> object:
        if self.auto and raw == AUTO_WORD:
            return 0
        size = parse_size(raw) if isinstance(raw, str) else raw
        if not isinstance(size, int) or isinstance(size, bool) or not self.low <= size <= self.high:
            raise _wrong(self, raw)
        return size


@dataclass(frozen=True, slots=True)
class Address:
    """ "host:port", read as HostPort. `low` 0 allows port 0: any free one."""

    low: int

    @property
    def allowed(self) -> str:
        return f'"host:port" with a port {self.low}..65535 (IPv6 in brackets)'

    def read(self, raw: object) -> object:
        if not isinstance(raw, str):
            raise _wrong(self, raw)
        address = parse_host_port(raw)
        if address.port < self.low:
            raise _wrong(self, raw)
        return address


@dataclass(frozen=True, slots=True)
class IpAddress:
    """An address in digits, or "" for none: NICs are bound by address, never by name."""

    allowed: str = "an IPv4 or IPv6 address"

    def read(self, raw: object) -> object:
        if raw == "":
            return raw
        if not isinstance(raw, str):
            raise _wrong(self, raw)
        try:
            return str(ipaddress.ip_address(raw))
        except ValueError:
            raise _wrong(self, raw) from None


@dataclass(frozen=True, slots=True)
class AbsolutePath:
    """An absolute path, or one of `words` that stand for one."""

    words: tuple[str, ...] = ()
    most: int = 4095

    @property
    def allowed(self) -> str:
        bound = f" of at most {self.most} characters" if self.most < 4095 else ""
        return f"an absolute path{bound}" + "".join(f' or "{word}"' for word in self.words)

    def read(self, raw: object) -> object:
        if isinstance(raw, str) and raw in self.words:
            return raw
        if not isinstance(raw, str) or not raw.startswith("/") or "\0" in raw:
            raise _wrong(self, raw)
        if len(os.fsencode(raw)) > self.most:
            raise _wrong(self, raw)
        return str(Path(raw))

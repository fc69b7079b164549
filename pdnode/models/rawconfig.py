"""Typed access to a model's JSON files; problems are collected, each with its key."""

import json
from collections.abc import Mapping
from pathlib import Path

from pdnode.errors import ConfigError, Problem

_MAX_CONFIG_BYTES = 4 << 20


def read_json(path: Path) -> dict[str, object]:
    """A JSON object from `path`; ConfigError names the file and what is wrong with it."""
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ConfigError([Problem(str(path), f"larger than {_MAX_CONFIG_BYTES} bytes")])
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError([Problem(str(path), f"cannot be read: {error.strerror}")]) from error
    except ValueError as error:
        raise ConfigError([Problem(str(path), f"is not JSON: {error}")]) from error
    if not isinstance(value, dict):
        raise ConfigError([Problem(str(path), "is not a JSON object")])
    return value


class Reader:
    """A JSON object's values by key. A wrong one is a problem, and a harmless one is returned.

    A key with `null` counts as missing. `within`: the key under which the object was found.
    """

    def __init__(self, raw: Mapping[str, object], *, within: str = "") -> None:
        self.raw = raw
        self.problems: list[Problem] = []
        self._within = f"{within}." if within else ""

    def problem(self, key: str, text: str) -> None:
        self.problems.append(Problem(f"config.json: {self._within}{key}", text))

    def has(self, key: str) -> bool:
        return self.raw.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            what = "a positive integer" if least == 1 else f"an integer of at least {least}"
            self.problem(key, f"{value!r} is not {what}")
            return max(1, least)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            self.problem(key, f"{value!r} is not a positive number")
            return 1.0
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            self.problem(key, f"{value!r} is neither true nor false")
        return value is True

    def integers(self, key: str) -> list[int]:
        """A list of integers; empty where the key is missing."""
        value = self._value(key, [])
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            self.problem(key, f"{value!r} is not a list of integers")
            return []
        return value

    def only(self, key: str, *allowed: object) -> None:
        """A key that may be missing, or have one of these values."""
        value = self.raw.get(key)
        if value is not None and value not in allowed:
            names = ", ".join(str(one) for one in allowed)
            self.problem(key, f"{value!r} is not supported; allowed: {names}")

    def _value(self, key: str, default: object) -> object:
        value = self.raw.get(key)
        return default if value is None else value

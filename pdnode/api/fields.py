"""Reading one JSON object field by field, strictly: `true` is not 1, `null` is absent."""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from pdnode.errors import BadRequest

_SHOWN_CHARACTERS = 64


class Neutral(NamedTuple):
    """A field that would change the answer and is not built: only these values are accepted."""

    name: str
    allowed: tuple[object, ...] = ()  # besides null


def show(value: object) -> str:
    """`value` as JSON for an error message, cut to a length that cannot flood a log."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def kind_of(value: object) -> str:
    """JSON's name of the type of `value`."""
    kinds: dict[type, str] = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return kinds.get(type(value), "null")


def wrong_type(name: str, value: object, expected: str) -> BadRequest:
    return BadRequest(f"{name}: {expected} is expected, not {kind_of(value)}", name)


class Fields:
    """One JSON object being read. Every reader raises errors.BadRequest that names the field."""

    def __init__(self, body: Mapping[str, object], prefix: str = "") -> None:
        self._body = body
        self._prefix = prefix
        self._read: set[str] = set()

    def take(self, name: str) -> object:
        """Raw value, or None when absent or null. Marks the field as known."""
        self._read.add(name)
        return self._body.get(name)

    def path(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def number(
        self, name: str, *, default: float, low: float, high: float, above: bool = False
    ) -> float:
        """A number in [low, high], or in (low, high] with `above`."""
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(self.path(name), value, "a number")
        if not (low < value if above else low <= value) or value > high:
            span = f"above {low:g}, at most {high:g}" if above else f"{low:g} to {high:g}"
            raise self._refused(name, value, span)
        return float(value)

    def integer(self, name: str, *, low: int, high: int) -> int | None:
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong_type(self.path(name), value, "an integer")
        if not low <= value <= high:
            raise self._refused(name, value, f"{low} to {high}")
        return value

    def boolean(self, name: str) -> bool:
        """False when absent."""
        value = self.take(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise wrong_type(self.path(name), value, "a boolean")
        return value

    def string(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise wrong_type(self.path(name), value, "a string")
        return value

    def items(self, name: str, *, limit: int) -> list[object] | None:
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise wrong_type(self.path(name), value, "a list")
        if len(value) > limit:
            raise BadRequest(
                f"{self.path(name)}: {len(value)} entries; at most {limit} are allowed",
                self.path(name),
            )
        return value

    def child(self, name: str) -> "Fields | None":
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise wrong_type(self.path(name), value, "an object")
        return Fields(value, f"{self.path(name)}.")

    def neutral(self, table: tuple[Neutral, ...]) -> None:
        """Refuse every field of `table` that is there with a value that would change the answer."""
        for name, allowed in table:
            value = self.take(name)
            if value is None or any(_same(value, one) for one in allowed):
                continue
            choices = " or ".join([*(show(one) for one in allowed), "nothing"])
            raise BadRequest(
                f"{self.path(name)}: {show(value)} is not supported; allowed: {choices}",
                self.path(name),
            )

    def unknown(self) -> int:
        """How many fields nobody has read."""
        return len(self._body.keys() - self._read)

    def _refused(self, name: str, value: object, span: str) -> BadRequest:
        return BadRequest(
            f"{self.path(name)}: {show(value)} is out of range; allowed: {span}", self.path(name)
        )


def _same(value: object, allowed: object) -> bool:
    """Equal as JSON: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, bool) or isinstance(allowed, bool):
        return value is allowed
    return value == allowed

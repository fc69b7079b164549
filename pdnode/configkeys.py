"""What a key and a table of the configuration file are."""

from dataclasses import dataclass

from pdnode.configkinds import Kind


@dataclass(frozen=True, slots=True)
class Key:
    name: str
    kind: Kind
    default: str | int | float | bool | tuple[str, ...] | None  # None: must be given; "": not set
    doc: str
    reload: bool = False
    sample: str = ""  # shown in the example where the default is not set


@dataclass(frozen=True, slots=True)
class Table:
    """`many`: an array of tables (`[[name]]`), at most `most` of them."""

    name: str
    doc: str
    keys: tuple[Key, ...]
    many: bool = False
    most: int = 1

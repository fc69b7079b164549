"""What the calls that we make of FlashInfer and cuda-python take: tests/data/signatures."""

import inspect
import json
from functools import cache
from pathlib import Path

_DATA = Path(__file__).parents[1] / "data" / "signatures"


def versions(package: str) -> list[str]:
    """Those that there is a table of."""
    found = _DATA.glob(f"{package}-*.json")
    return sorted(path.stem.removeprefix(f"{package}-") for path in found)


@cache
def signatures(package: str, version: str) -> dict[str, inspect.Signature]:
    table = json.loads((_DATA / f"{package}-{version}.json").read_text())
    assert (table["package"], table["version"]) == (package, version)
    return {
        name: inspect.Signature(
            [
                inspect.Parameter(
                    parameter,
                    inspect._ParameterKind[kind.upper()],
                    default=inspect.Parameter.empty if needed or "var" in kind else None,
                )
                for parameter, kind, needed in parameters
            ]
        )
        for name, parameters in table["calls"].items()
    }


def bound(
    package: str, version: str, name: str, args: tuple[object, ...], kwargs: dict[str, object]
) -> dict[str, object]:
    """The arguments of a call by name; TypeError if the package would not take them."""
    found = signatures(package, version)[name].bind(*args, **kwargs)
    return dict(found.arguments)

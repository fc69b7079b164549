"""Real machines with their answers: the few that this repository carries, and the whole collection
where it lies beside the repository."""

import json
import re
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

OWN = Path(__file__).resolve().parents[1] / "data" / "topology"


@cache
def collection() -> Path:
    """The topology folder of the collection; the own one where it is not there."""
    for parent in OWN.parents[2:]:
        found = parent / "shared" / "data" / "topology"
        if (found / "answers").is_dir():
            return found
    return OWN


def answer_files(kind: str) -> list[Path]:
    """Answers about `kind`: hwloc, nccl or lspci; those of this repository at least."""
    found = {path.name: path for path in sorted(OWN.glob(f"answers/{kind}-*.json"))}
    found |= {path.name: path for path in sorted(collection().glob(f"answers/{kind}-*.json"))}
    return list(found.values())


def read_answer(path: Path) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(path.read_text())
    return answer


def source_of(answer: dict[str, Any]) -> Path:
    """The file that the answer was computed from."""
    relative = Path(*Path(answer["source_file"]).parts[1:])
    own = OWN / relative
    return own if own.exists() else collection() / relative


_READ = re.compile(
    r"/proc/driver/|/sys/(bus/pci|class/(net|infiniband)|devices/pci)"
    r"|/sys/devices/(scif|virtual/net)|/node/node\d+(/cpu(list|map)|/distance|$)"
    r"|/cpu/online|/cpu\d+/topology"
)
"""What the detection may look at: a tenth of the files of a real tree."""


def unpack(archive: Path, into: Path) -> Path:
    """The sys folder of an archived tree."""
    with tarfile.open(archive) as tar:
        members = [member for member in tar if _READ.search(member.name)]
        tar.extractall(into, members, filter="tar")
    return next(into.glob("*/sys"))

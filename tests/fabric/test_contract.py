"""`_native.pyi` says what the module has, and the library is found where it should be."""

import ast
import re
from pathlib import Path

import pytest

from pdnode.engine import protocol
from pdnode.errors import DeviceMissing
from pdnode.fabric import _native, library

STUB = Path(_native.__file__ or "").name and Path(library.__file__).with_name("_native.pyi")


def declared() -> dict[str, dict[str, list[str] | None]]:
    """Classes of the stub: member → argument names, None for a property or attribute."""
    found: dict[str, dict[str, list[str] | None]] = {"": {}}
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.ClassDef):
            members = found.setdefault(node.name, {})
            for item in node.body:
                if isinstance(item, ast.FunctionDef):
                    is_property = any(
                        isinstance(mark, ast.Name) and mark.id == "property"
                        for mark in item.decorator_list
                    )
                    names = [argument.arg for argument in item.args.args[1:]]
                    members[item.name] = None if is_property else names
                elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    members[item.target.id] = None
        elif isinstance(node, ast.FunctionDef):
            found[""][node.name] = [argument.arg for argument in node.args.args]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[""][node.target.id] = None
    return found


def argument_names(function: object) -> list[str]:
    """From the first line of a nanobind function's text: `name(self, a: int, b: str) -> …`."""
    text = (getattr(function, "__doc__", None) or "").splitlines()[0]
    inner = text[text.index("(") + 1 : text.rindex(") ->") if ") ->" in text else text.rindex(")")]
    depth, names, word = 0, [], ""
    for sign in inner + ",":
        depth += (sign in "[(") - (sign in "])")
        if sign == "," and depth == 0:
            names.append(word.split(":")[0].split("=")[0].strip())
            word = ""
        else:
            word += sign
    return [name for name in names if name and name != "self"]


def test_the_stub_and_the_module_agree() -> None:
    stub = declared()
    module = {name for name in vars(_native) if not name.startswith("_")}
    assert module == {name for name in stub if name} | set(stub[""])
    for name, members in stub.items():
        if not name or name == "FabricError":
            continue
        real = vars(getattr(_native, name))
        public = {member for member in real if not member.startswith("_")}
        assert public == {member for member in members if not member.startswith("_")}, name
        for member, arguments in members.items():
            if member == "__init__":
                continue
            if arguments is None:
                assert isinstance(real[member], property), member
            else:
                assert argument_names(real[member]) == arguments, member


def test_event_kinds_are_those_that_the_stub_explains() -> None:
    explained = re.findall(r"^([a-z]+) {2,}\S", STUB.read_text(), re.MULTILINE)
    assert tuple(kind for kind in explained if kind in _native.EVENT_KINDS) == _native.EVENT_KINDS


def test_the_counter_page_has_one_layout() -> None:
    header = Path(library.__file__).with_name("native") / "memory.hpp"
    numbers = dict(re.findall(r"constexpr \w+ (k\w+) = (\d+);", header.read_text()))
    assert int(numbers["kCounterPageBytes"]) == protocol.COUNTER_PAGE_BYTES
    assert int(numbers["kSleepingOffset"]) == protocol.SLEEPING_OFFSET
    assert int(numbers["kMaxGroups"]) == protocol.MAX_GROUPS
    assert int(numbers["kSilentOffset"]) == protocol.SILENT_OFFSET
    assert protocol.COUNTER_OFFSET == 0


def test_build_info_names_compiler_headers_and_sanitizer() -> None:
    info = _native.build_info()
    assert set(info) == {"compiler", "libfabric_headers", "sanitizer"}
    assert re.fullmatch(r"\d+\.\d+", info["libfabric_headers"])


def test_a_configured_library_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "libfabric.so.1"
    with pytest.raises(DeviceMissing, match="there is no file"):
        library.find_library(str(path), "tcp")
    path.touch()
    assert library.find_library(str(path), "tcp") == path
    with pytest.raises(DeviceMissing, match=r"'libfabric\.so\.1' is not an absolute path"):
        library.find_library("libfabric.so.1", "tcp")


def test_auto_prefers_efa_then_the_system_then_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    efa, old, new = (tmp_path / name for name in ("efa", "old", "new"))
    for directory, real in ((efa, "1.20.0"), (old, "1.20.0"), (new, "1.21.0")):
        directory.mkdir()
        (directory / f"libfabric.so.{real}").touch()
        (directory / "libfabric.so.1").symlink_to(f"libfabric.so.{real}")
    monkeypatch.setattr(library, "EFA_DIRECTORIES", (efa,))
    monkeypatch.setattr(library, "SYSTEM_DIRECTORIES", (old, new))
    assert library.find_library("auto", "efa") == efa / "libfabric.so.1"
    assert library.find_library("auto", "tcp") == new / "libfabric.so.1"
    monkeypatch.setattr(library, "SYSTEM_DIRECTORIES", (old,))
    wheel = library.find_library("auto", "tcp")
    assert wheel == library.find_in_wheel()
    assert wheel.is_file()
    monkeypatch.setattr(library, "WHEEL", "no-such-distribution-of-pdnode")
    with pytest.raises(DeviceMissing, match=r"is older than 1\.18; the Python package"):
        library.find_library("auto", "tcp")


SYSTEM_LIBRARIES = [
    directory / library.SONAME
    for directory in library.SYSTEM_DIRECTORIES
    if (directory / library.SONAME).is_file()
    and not library.is_new_enough(directory / library.SONAME)
]


@pytest.mark.skipif(not SYSTEM_LIBRARIES, reason="no libfabric older than 1.18 on this system")
def test_an_old_library_is_refused_in_words() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from pdnode.fabric._native import Fabric, FabricError\n"
        "try: Fabric(sys.argv[1], 'tcp', 'busy')\n"
        "except FabricError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(SYSTEM_LIBRARIES[0])],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert re.search(r"is libfabric 1\.\d+; 1\.18 or newer is needed", done.stdout), done.stdout

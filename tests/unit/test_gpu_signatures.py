"""Every call of cuda-python and FlashInfer that the source makes, bound with the signatures of the
versions that are named in pyproject.toml's extra (tests/data/signatures; make gpu-signatures)."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.signatures import bound, signatures, versions

ROOT = Path(__file__).parents[2]
_CALL = re.compile(r"(cu|nvrtc)[A-Z]\w+")
# Our functions that make a call by its name, and how many arguments they have of their own.
_BY_NAME = {"call": 1, "_checked": 2}
_CUDA = versions("cuda-bindings")
(_FLASHINFER,) = versions("flashinfer-python")


def called(tree: ast.AST) -> Iterator[tuple[str, ast.Call, int]]:
    """(name, the call, how many of its first arguments are not the driver's)."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        first = node.args[0] if node.args else None
        if name in _BY_NAME and isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value, node, _BY_NAME[name]
        elif isinstance(function, ast.Attribute) and _CALL.fullmatch(name):
            yield name, node, 0


def source_calls() -> list[tuple[str, str, ast.Call, int]]:
    """With the file of each; ctypes' calls of the driver in engine/device.py are none."""
    return [
        (path.name, name, node, own)
        for path in sorted((ROOT / "pdnode").rglob("*.py"))
        if path.name != "device.py"
        for name, node, own in called(ast.parse(path.read_text()))
    ]


@pytest.mark.parametrize("version", _CUDA)
def test_calls_of_cuda_python_bind(version: str) -> None:
    calls = source_calls()
    names = {name for _, name, _, _ in calls}
    assert {"cuMemCreate", "cuLaunchKernel", "nvrtcCompileProgram", "cuDeviceGetCount"} <= names
    for file, name, node, own in calls:
        arguments = tuple(node.args[own:])
        assert not any(isinstance(one, ast.Starred) for one in arguments), (file, name)
        keywords: dict[str, object] = {key.arg or "**": key.value for key in node.keywords}
        try:
            bound("cuda-bindings", version, name, arguments, keywords)
        except (KeyError, TypeError) as error:
            text = f"{file}: {name} of cuda-bindings {version}: {error!r}"
            pytest.fail(f"{text}; a call that is new goes into the tables by `make gpu-signatures`")


def test_a_wrong_call_does_not_bind() -> None:
    for arguments in ((), (1, 2), (1, 2, 3, 4)):
        with pytest.raises(TypeError):
            bound("cuda-bindings", _CUDA[0], "cuMemCreate", arguments, {})
    with pytest.raises(TypeError, match="causal"):
        bound("flashinfer-python", _FLASHINFER, "append_paged_kv_cache", (1,) * 8, {"causal": True})


def test_names_of_flashinfer_are_in_the_table() -> None:
    """Their arguments are bound where the back end runs over the stand-in (tests/engine)."""
    known = {name.partition(".")[0] for name in signatures("flashinfer-python", _FLASHINFER)}
    used = set()
    for path in sorted((ROOT / "pdnode" / "engine").glob("flash*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute):
                continue
            holder = ast.unparse(node.value)
            if re.fullmatch(r"(self\._)?flashinfer(\.mla)?", holder) and node.attr != "mla":
                used.add(node.attr)
    assert len(used) == 8
    assert used <= known


def test_the_extra_names_these_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = dict(
        re.fullmatch(r"([\w-]+)(.*)", one).groups()  # type: ignore[union-attr]
        for one in project["optional-dependencies"]["cuda"]
    )
    assert extra["flashinfer-python"] == f"=={_FLASHINFER}"
    assert extra["cuda-python"] == ">=12.9,<14"
    assert [version.partition(".")[0] for version in _CUDA] == ["12", "13"]

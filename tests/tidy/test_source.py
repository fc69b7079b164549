"""Small files, small functions, no empty modules, a docstring on each, nothing left undone."""

import ast
from pathlib import Path

import pytest

from tests.tidy.repository import files, python_files, read

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 70
CODE = {".py", ".pyi", ".cpp", ".hpp", ".c", ".h", ".sh"}
UNFINISHED = ("TO" + "DO", "FIX" + "ME", "X" * 3)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> list[Function]:
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def test_files_are_small() -> None:
    long = {
        str(path): lines
        for path in files()
        if path.suffix in CODE and (lines := len(read(path).splitlines())) > MAX_FILE_LINES
    }
    assert long == {}, f"files above {MAX_FILE_LINES} lines"


def test_functions_are_small() -> None:
    long = {
        f"{path}:{node.lineno} {node.name}": lines
        for path in python_files()
        for node in functions(ast.parse(read(path)))
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert long == {}, f"functions above {MAX_FUNCTION_LINES} lines"


def test_every_module_has_a_docstring() -> None:
    silent = [
        str(path)
        for path in python_files()
        if path.name != "conftest.py" and not ast.get_docstring(ast.parse(read(path)))
    ]
    assert silent == []


def test_no_module_is_empty() -> None:
    """Something besides the docstring; a package may consist of its docstring."""
    empty = [
        str(path)
        for path in python_files()
        if path.name != "__init__.py" and len(ast.parse(read(path)).body) < 2
    ]
    assert empty == []


def test_every_package_folder_has_an_init() -> None:
    folders = {path.parent for path in python_files() if path.parts[0] == "pdnode"}
    assert [str(folder) for folder in folders if folder / "__init__.py" not in files()] == []


@pytest.mark.parametrize("word", UNFINISHED)
def test_nothing_is_left_undone(word: str) -> None:
    found = [str(path) for path in files() if path.suffix in CODE and word in read(path).split()]
    found += [str(p) for p in files() if p.suffix in CODE and f"{word}:" in read(p).split()]
    assert found == []


def test_test_modules_are_found_by_pytest() -> None:
    """A test function in a file that pytest does not collect would never run."""
    lost = [
        str(path)
        for path in python_files()
        if path.parts[0] == "tests" and not path.name.startswith("test_")
        and any(node.name.startswith("test_") for node in functions(ast.parse(read(path))))
    ]  # fmt: skip
    assert lost == []


def test_no_name_is_used_for_two_test_modules() -> None:
    seen: dict[str, Path] = {}
    twice = []
    for path in python_files():
        if path.parts[0] == "tests" and path.name.startswith("test_"):
            if path.name in seen:
                twice.append(f"{seen[path.name]} and {path}")
            seen[path.name] = path
    assert twice == []

"""Writes tests/data/signatures: what the calls that we make of FlashInfer and cuda-python take.

    scripts/gpu_signatures.py DIRECTORY        (make gpu-signatures: build/gpu-signatures)

Fetches the wheels of VERSIONS, without what they depend on: no CUDA build of torch. cuda-python is
imported from there by a Python of its own and asked (inspect.signature). FlashInfer cannot be
imported without 1.7 GB of dependencies, so its signatures are read from its source.
"""

import ast
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

FLASHINFER = "0.7.4"
CUDA_BINDINGS = ("12.9.5", "13.5.0")
_TARGET = Path(__file__).parent.parent / "tests" / "data" / "signatures"
_SOURCES = {
    "page.py": ("append_paged_kv_cache", "append_paged_mla_kv_cache"),
    "decode.py": ("BatchDecodeWithPagedKVCacheWrapper",),
    "prefill.py": ("BatchPrefillWithPagedKVCacheWrapper",),
    "mla/_batch_mla/_wrapper.py": ("BatchMLAPagedAttentionWrapper",),
    "mla/_batch_mla/_contracts.py": ("MLAPlanMetadata",),
    "sampling.py": ("top_k_renorm_probs", "top_p_renorm_probs"),
}
_METHODS = {"__init__", "plan", "run", "csr", "_plan_impl"}
# A method that takes **kwargs for another one, whose signature counts.
_PASSED_ON = {"BatchDecodeWithPagedKVCacheWrapper.plan": "_plan_impl"}
_MODULES = ("driver", "nvrtc")
_ASK = """
import importlib, inspect, json, sys
found = {}
for name in sys.argv[1:]:
    module = importlib.import_module("cuda.bindings." + name)
    for call in sorted(vars(module)):
        if call.startswith(("cu", "nvrtc")) and callable(getattr(module, call)):
            try:
                parameters = inspect.signature(getattr(module, call)).parameters.values()
            except ValueError:
                continue
            found[call] = [
                [p.name, p.kind.name.lower(), p.default is inspect.Parameter.empty]
                for p in parameters
            ]
print(json.dumps(found))
"""

Parameters = list[list[str | bool]]
"""Of each: name, kind (as inspect.Parameter, in lower case), and whether it must be given."""


def main() -> int:
    (directory,) = map(Path, sys.argv[1:])
    wheels = directory / "wheels"
    _pip("download", "--no-deps", "-d", wheels, f"flashinfer-python=={FLASHINFER}")
    (wheel,) = wheels.glob(f"flashinfer_python-{FLASHINFER}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        calls = dict(
            signature
            for source, names in _SOURCES.items()
            for signature in _read(archive.read(f"flashinfer/{source}").decode(), names)
        )
    _write("flashinfer-python", FLASHINFER, "read from its source", calls)
    for version in CUDA_BINDINGS:
        place = directory / version
        packages = (f"cuda-bindings=={version}", "cuda-pathfinder")
        _pip("install", "--no-deps", "--upgrade", "-t", place, *packages)
        asked = subprocess.run(
            [sys.executable, "-c", _ASK, *_MODULES],
            env={"PYTHONPATH": str(place)},
            stdout=subprocess.PIPE,
            check=True,
        )
        used = {name: found for name, found in json.loads(asked.stdout).items() if _wanted(name)}
        _write("cuda-bindings", version, "asked with inspect.signature", used)
    return 0


def _pip(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", *arguments], check=True)


def _wanted(name: str) -> bool:
    """Calls of the driver that some file of ours names."""
    root = Path(__file__).parent.parent / "pdnode"
    word = re.compile(rf"\b{name}\b")
    return any(word.search(path.read_text(encoding="utf-8")) for path in root.rglob("*.py"))


def _write(package: str, version: str, how: str, calls: dict[str, Parameters]) -> None:
    path = _TARGET / f"{package}-{version}.json"
    lines = [f"  {json.dumps(name)}: {json.dumps(calls[name])}" for name in sorted(calls)]
    head = json.dumps({"package": package, "version": version, "how": how})[:-1]
    path.write_text(f'{head},\n "calls": {{\n' + ",\n".join(lines) + "\n }}\n", encoding="utf-8")


def _read(source: str, names: tuple[str, ...]) -> Iterator[tuple[str, Parameters]]:
    """(name, parameters) of functions, and of the methods that we call of classes."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            yield node.name, _parameters(node, bound=False)
        if isinstance(node, ast.ClassDef) and node.name in names:
            # Overloads come first, the real one last.
            methods = {
                method.name: method
                for method in node.body
                if isinstance(method, ast.FunctionDef) and method.name in _METHODS
            }
            for name in methods:
                full = f"{node.name}.{name}"
                if name != "_plan_impl":
                    yield full, _parameters(methods[_PASSED_ON.get(full, name)], bound=True)


def _parameters(function: ast.FunctionDef, *, bound: bool) -> Parameters:
    """Without `self`, where `bound`."""
    given = function.args
    plain = [*given.posonlyargs, *given.args]
    needed = len(plain) - len(given.defaults)
    found: Parameters = [
        [
            argument.arg,
            "positional_only" if place < len(given.posonlyargs) else "positional_or_keyword",
            place < needed,
        ]
        for place, argument in enumerate(plain)
    ]
    if given.vararg:
        found.append([given.vararg.arg, "var_positional", False])
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        found.append([argument.arg, "keyword_only", default is None])
    if given.kwarg:
        found.append([given.kwarg.arg, "var_keyword", False])
    return found[1:] if bound else found


if __name__ == "__main__":
    sys.exit(main())

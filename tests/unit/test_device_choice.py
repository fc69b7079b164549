"""Which device the engine takes, and what is said where the host cannot do what is asked for."""

import ctypes
import dataclasses
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from pdnode.cli import main
from pdnode.config import Config, EngineConfig, ModelConfig, NodeConfig
from pdnode.configdevice import with_device
from pdnode.confighost import check_host
from pdnode.configrules import dtypes, page_tokens
from pdnode.engine import device
from pdnode.errors import ConfigError, DeviceMissing, Exit
from pdnode.types import Role


def asking(tmp_path: Path, wanted: str, **engine: object) -> Config:
    config = Config(
        node=NodeConfig(id="n", role=Role.COLOCATED, admin_socket=tmp_path / "admin.sock"),
        model=ModelConfig(path=tmp_path, name="m"),
    )
    return dataclasses.replace(config, engine=EngineConfig(device=wanted, **engine))  # type: ignore[arg-type]


class Driver:
    """libcuda.so.1 as ctypes shows it."""

    def __init__(self, *, init: int = 0, gpus: int = 1) -> None:
        self._init = init
        self._gpus = gpus

    def cuInit(self, flags: int) -> int:
        return self._init

    def cuDeviceGetCount(self, count: "ctypes._Pointer[ctypes.c_int]") -> int:
        ctypes.cast(count, ctypes.POINTER(ctypes.c_int))[0] = self._gpus
        return 0


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A host with everything; a test takes something away."""
    (tmp_path / "version.py").write_text("__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\n")
    place = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(device, "find_spec", lambda name: place)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    return monkeypatch


def test_a_host_with_everything_lacks_nothing(host: pytest.MonkeyPatch) -> None:
    assert device.missing_for_cuda() == ""


@pytest.mark.parametrize(
    ("gone", "named"),
    [("cuda.bindings", "cuda-python"), ("flashinfer", "FlashInfer"), ("torch", "torch")],
)
def test_a_missing_package_is_named_with_the_command(
    host: pytest.MonkeyPatch, gone: str, named: str
) -> None:
    found = device.find_spec
    host.setattr(device, "find_spec", lambda name: None if name == gone else found(name))
    text = device.missing_for_cuda()
    assert named in text
    assert text.endswith("(pip install 'pdnode[cuda]')")


def test_a_package_whose_parent_is_missing_is_missing(host: pytest.MonkeyPatch) -> None:
    found = device.find_spec

    def find(name: str) -> ModuleSpec | None:
        if name == "cuda.bindings":
            raise ModuleNotFoundError(name)
        return found(name)

    host.setattr(device, "find_spec", find)
    assert "not installed: cuda-python (" in device.missing_for_cuda()


@pytest.mark.parametrize("line", ["cuda: Optional[str] = None", "cuda = None", ""])
def test_a_cpu_build_of_torch_is_not_enough(
    host: pytest.MonkeyPatch, tmp_path: Path, line: str
) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0+cpu'\n{line}\nhip = '6.0'\n")
    assert "a CUDA build of torch" in device.missing_for_cuda()


@pytest.mark.parametrize(
    ("driver", "text"),
    [
        (Driver(init=803), "cuInit answers 803"),
        (Driver(gpus=0), "shows no GPU"),
        (None, "libcuda.so.1 is not found"),
    ],
)
def test_a_driver_that_shows_no_gpu(
    host: pytest.MonkeyPatch, driver: Driver | None, text: str
) -> None:
    def load(name: str) -> Driver:
        if driver is None:
            raise OSError(f"{name}: cannot open shared object file")
        return driver

    host.setattr(ctypes, "CDLL", load)
    assert text in device.missing_for_cuda()


def test_auto_takes_what_is_there_and_says_why(tmp_path: Path) -> None:
    with_gpu = with_device(asking(tmp_path, "auto"), lambda: "").engine
    assert (with_gpu.device, "FlashInfer are here" in with_gpu.device_reason) == ("cuda", True)
    without = with_device(asking(tmp_path, "auto"), lambda: "no NVIDIA driver").engine
    assert (without.device, without.device_reason) == ("cpu", "no CUDA: no NVIDIA driver")


def test_auto_does_not_pass_over_gpus_that_are_named(tmp_path: Path) -> None:
    config = asking(tmp_path, "auto", gpus=("0",))
    assert with_device(config, lambda: "").engine.device == "cuda"
    with pytest.raises(
        DeviceMissing,
        match=r"^engine\.gpus: the GPUs named here cannot be used: no CUDA: no FlashInfer$",
    ):
        with_device(config, lambda: "no FlashInfer")


def test_what_is_auto_follows_the_device_that_was_taken(tmp_path: Path) -> None:
    found = with_device(asking(tmp_path, "auto"), lambda: "")
    assert (dtypes(found), page_tokens(found)) == (("bfloat16", "bfloat16"), 64)
    found = with_device(asking(tmp_path, "auto"), lambda: "no GPU")
    assert (dtypes(found), page_tokens(found)) == (("float32", "float32"), 16)


def test_keys_that_do_not_fit_the_device_that_auto_took(tmp_path: Path) -> None:
    config = asking(tmp_path, "auto", chunk_tokens=48, dtype="float32")
    with_device(config, lambda: "no GPU")
    with pytest.raises(ConfigError) as caught:
        with_device(config, lambda: "")
    assert [problem.where for problem in caught.value.problems] == [
        "engine.chunk_tokens",
        "engine.dtype",
    ]


def test_cuda_where_it_is_missing_is_a_missing_device(tmp_path: Path) -> None:
    with pytest.raises(
        DeviceMissing, match=r'^engine\.device: "cuda" cannot be used: no FlashInfer'
    ):
        with_device(asking(tmp_path, "cuda"), lambda: "no FlashInfer")


def test_check_host_says_it_and_that_the_file_is_not_at_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> Driver:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    (problem,) = check_host(asking(tmp_path, "cuda"))
    assert (problem.where, problem.device) == ("engine.device", True)
    assert "no NVIDIA driver (libcuda.so.1 is not found)" in problem.text


def test_serve_ends_with_one_line_and_exit_71(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(name: str) -> Driver:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "config.toml"
    path.write_text(
        f'''config_version = 1
[node]
role = "colocated"
admin_socket = "{tmp_path}/admin.sock"
[model]
path = "{tmp_path}"
[engine]
device = "cuda"
[api]
listen = "127.0.0.1:0"
'''
    )
    assert main(["serve", "--config", str(path)]) == Exit.DEVICE_MISSING
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith('engine.device: "cuda" cannot be used: no NVIDIA driver (libcuda.so.1')
    assert "pip install 'pdnode[cuda]'" in line

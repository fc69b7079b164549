"""`pdnode check-config --host` on the stub of the driver: the GPUs that a file names."""

from pathlib import Path

import pytest

from tests.support.cuda_stub import environment, run_python
from tests.support.host_tree import GPU, MELLANOX, HostTree
from tests.support.tiny_model import write_tiny_llama

pytestmark = pytest.mark.timeout(400)


def check(folder: Path, engine: str, region: str = "staged", **settings: str) -> tuple[int, str]:
    """Exit code and what is said of GPUs."""
    model = write_tiny_llama(folder / "model")
    file = folder / "node.toml"
    text = f"""
        config_version = 1
        node = {{ role = "colocated", admin_socket = "{folder}/admin.sock" }}
        model = {{ path = "{model}" }}
        api = {{ listen = "127.0.0.1:0" }}
        kv = {{ region = "{region}" }}
        engine = {{ {engine} }}
    """
    file.write_text(text)
    command = ["-m", "pdnode", "check-config", "--host", "--config", str(file)]
    done = run_python(*command, variables=environment(**settings))
    said = done.stdout + done.stderr
    lines = [line for line in said.splitlines() if "engine.gpus" in line or "kv.region" in line]
    return done.returncode, "\n".join(lines)


@pytest.mark.parametrize(
    ("engine", "region", "settings", "code", "said"),
    [
        ('gpus = ["0000:1B:00.0"]', "staged", {}, 0, ""),
        ('gpus = ["0000:1c:00.0"]', "staged", {}, 71, "no GPU 0000:1c:00.0 is visible here; there"),
        ("tp = 2, dp = 2", "staged", {}, 71, "4 workers (tp × dp) need a GPU each, 2 are visible"),
        ("tp = 2", "cumem", {"STUB_CUDA_DMA_BUF": "0"}, 71, "the driver exports no dma-buf of GPU"),
        ("tp = 2", "staged", {"STUB_CUDA_DMA_BUF": "0"}, 0, ""),
        ("", "cumem", {"STUB_CUDA_ORDERING": "0"}, 0, ""),
        (
            "",
            "cumem",
            {"STUB_CUDA_ORDERING": "0", "STUB_CUDA_FLUSH": "2"},
            71,
            'GPU 0000:1a:00.0 neither orders nor flushes what NICs write; use "auto" or "staged"',
        ),
        ("tp = 2", "auto", {"STUB_CUDA_DEVICES": "0"}, 0, ""),
        ("tp = 2", "staged", {"STUB_CUDA_DEVICES": "0"}, 71, "cuInit: CUDA_ERROR_NO_DEVICE"),
    ],
)
def test_gpus_of_the_host(
    tmp_path: Path, engine: str, region: str, settings: dict[str, str], code: int, said: str
) -> None:
    found, text = check(tmp_path, engine, region, **settings)
    assert (found, said in text) == (code, True), text
    if not said:
        assert "visible" not in text
        assert "kv.region" not in text


@pytest.mark.parametrize(
    ("gpus", "groups"),
    [
        (("0", "1"), "(0, 1) [('mlx5_0', 0), ('mlx5_1', 1)]"),
        (("1", "0000:1A:00.0"), "(0, 1) [('mlx5_1', 0), ('mlx5_0', 1)]"),
        (("1",), "(0,) [('mlx5_1', 0)]"),
    ],
)
def test_device_groups_follow_the_gpus_of_the_ranks(
    tmp_path: Path, gpus: tuple[str, ...], groups: str
) -> None:
    """By the address that the driver gives a GPU, whatever a file calls it."""
    tree = HostTree(tmp_path)
    for number, letter in enumerate("ab"):
        under = (f"{number + 1}0:00.0",)
        tree.pci(f"1{letter}:00.0", GPU, under=under)
        nic = tree.pci(f"2{letter}:00.0", MELLANOX, under=under)
        tree.rdma(f"mlx5_{number}", nic)
        tree.net(f"eth{number}", nic)
    command = ["-m", "tests.cuda.chosen_nics", str(tree.root), *gpus]
    done = run_python(*command, variables=environment())
    assert done.stdout.strip() == groups, done.stderr

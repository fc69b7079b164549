"""The manifests of examples/kubernetes: after the API's schemas, and fitting together.

Nothing of them was run. kubernetes-validate carries the schemas of Kubernetes; KServe's are in
tests/data/kubernetes, as far as its fields are used.
"""

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from pdnode.config import Config
from pdnode.configparse import parse

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "kubernetes"
KSERVE = json.loads((ROOT / "tests" / "data" / "kubernetes" / "kserve.json").read_text())
VERSION = "1.33"
Document = dict[str, Any]


def documents(name: str) -> list[Document]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


NAMED = [
    pytest.param(document, id=f"{document['kind']}-{document['metadata']['name']}")
    for name in ("pdnode.yaml", "kserve.yaml")
    for document in documents(name)
]


def check(document: Document) -> None:
    if document["kind"] not in KSERVE:
        kubernetes_validate.validate(document, VERSION, strict=True)
        return
    jsonschema.validate(document, KSERVE[document["kind"]])
    spec = document["spec"]
    if document["kind"] == "ServingRuntime":
        pod = {key: spec[key] for key in ("containers", "volumes")}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "of-runtime"}, "spec": pod}
        kubernetes_validate.validate(pod, VERSION, strict=True)


@pytest.mark.parametrize("document", NAMED)
def test_after_the_schemas(document: Document) -> None:
    check(document)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("StatefulSet", lambda spec: spec.update(replica=1)),
        ("Deployment", lambda spec: spec["template"]["spec"]["containers"][0].update(arg=["x"])),
        ("ServingRuntime", lambda spec: spec.update(container=[])),
        ("ServingRuntime", lambda spec: spec["containers"][0].update(livenessProb={})),
        ("InferenceService", lambda spec: spec["predictor"]["model"].update(uri="pvc://x")),
    ],
)
def test_the_schemas_find_a_wrong_field(kind: str, change: Callable[[Document], None]) -> None:
    found = [one for name in ("pdnode.yaml", "kserve.yaml") for one in documents(name)]
    document = next(one for one in found if one["kind"] == kind)
    change(document["spec"])
    with pytest.raises(jsonschema.ValidationError):
        check(document)


def configurations(name: str) -> dict[str, Config]:
    """By the file's name in its ConfigMap; the pod's name stands for the host's."""
    maps = [one["data"] for one in documents(name) if one["kind"] == "ConfigMap"]
    configs = {}
    for file, text in maps[0].items():
        parsed = parse(tomllib.loads(text), host_name="pod")
        assert isinstance(parsed, Config), parsed
        configs[file] = parsed
    return configs


def pods(name: str) -> list[tuple[Document, Document]]:
    """(the object, its pod)"""
    found = []
    for one in documents(name):
        if one["kind"] in ("StatefulSet", "Deployment"):
            found.append((one, one["spec"]["template"]["spec"]))
        elif one["kind"] == "ServingRuntime":
            found.append((one, one["spec"]))
    return found


@pytest.mark.parametrize("name", ["pdnode.yaml", "kserve.yaml"])
def test_each_pod_reads_a_configuration_that_fits_it(name: str) -> None:
    configs = configurations(name)
    used = set()
    for owner, pod in pods(name):
        [container] = pod["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert set(mounts.values()) == set(volumes), owner["kind"]
        path = Path(container["args"][2])
        assert mounts[str(path.parent)] == "config"
        config = configs[path.name]
        used.add(path.name)
        ports = {port["containerPort"] for port in container["ports"]}
        served = {config.api.port}
        if config.node.role == "prefill":
            served |= {config.peer.port, config.fabric.port}
        assert ports == served
        [variable] = container["env"]
        assert variable["name"] == "CREDENTIALS_DIRECTORY"
        assert "secret" in volumes[mounts[variable["value"]]]
        assert str(Path(config.node.admin_socket).parent) in mounts
        grace = pod.get("terminationGracePeriodSeconds")
        assert grace is None or grace > config.node.shutdown_timeout_s
    assert used == set(configs)


def test_decode_nodes_find_the_prefill_node() -> None:
    prefill = next(one for one in documents("pdnode.yaml") if one["kind"] == "StatefulSet")
    service = prefill["spec"]["serviceName"]
    named = next(
        one for one in documents("pdnode.yaml")
        if one["kind"] == "Service" and one["metadata"]["name"] == service
    )  # fmt: skip
    assert named["spec"]["selector"] == prefill["spec"]["template"]["metadata"]["labels"]
    pod = f"{prefill['metadata']['name']}-0"
    port = configurations("pdnode.yaml")["prefill.toml"].peer.port
    for name in ("pdnode.yaml", "kserve.yaml"):
        [peer] = configurations(name)["decode.toml"].prefill
        assert (peer.name, peer.host, peer.port) == (pod, f"{pod}.{service}", port)


def test_the_image_has_the_user_that_pods_run_as() -> None:
    image = (ROOT / "packaging" / "Dockerfile").read_text()
    [user] = re.findall(r"^USER (\d+):(\d+)$", image, re.MULTILINE)
    assert f"--uid {user[0]} " in image
    for _, pod in pods("pdnode.yaml"):
        assert pod["securityContext"]["runAsUser"] == int(user[0])
    for _, pod in pods("kserve.yaml"):
        assert pod["containers"][0]["securityContext"]["runAsUser"] == int(user[0])


def test_the_image_is_of_known_instructions() -> None:
    lines = (ROOT / "packaging" / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    words = [line.split()[0] for line in lines if line and not line.startswith("#")]
    assert words == ["FROM", "RUN", "COPY", "RUN", "USER", "ENTRYPOINT", "CMD"]

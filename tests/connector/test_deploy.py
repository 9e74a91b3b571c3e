"""The compose file and the manifests of a fleet: valid YAML whose parts refer to each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"


def check_connector(arguments: list[str]) -> None:
    config = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    assert config == {
        "kv_connector": "RekindleConnector",
        "kv_connector_module_path": "rekindle.vllm",
        "kv_role": "kv_both",
    }


def test_the_compose_file_names_services_volumes_and_conditions_that_exist() -> None:
    file = yaml.safe_load((DEPLOY / "fleet.compose.yaml").read_text("utf-8"))
    services = file["services"]
    for service in services.values():
        assert {*service.get("depends_on", ())} <= {*services}
        volumes = [volume.partition(":")[0] for volume in service.get("volumes", ())]
        assert {*volumes} <= {*file["volumes"]}
        if "build" in service:
            assert (DEPLOY.parent / service["build"]["dockerfile"]).is_file()
            check_connector(service["command"])
    assert services["vllm-1"]["environment"]["REKINDLE_REDIS"].startswith("redis://redis:")


def test_selectors_and_references_of_the_manifests_exist() -> None:
    text = (DEPLOY / "fleet.kubernetes.yaml").read_text("utf-8")
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for document in yaml.safe_load_all(text):
        assert {"apiVersion", "kind", "metadata"} <= {*document}
        found[document["kind"], document["metadata"]["name"]] = document
    deployments = [document["spec"] for (kind, _), document in found.items() if kind == "Deployment"]
    labels = [spec["template"]["metadata"]["labels"] for spec in deployments]
    assert [spec["selector"]["matchLabels"] for spec in deployments] == labels
    assert all(document["spec"]["selector"] in labels for (kind, _), document in found.items() if kind == "Service")
    pod = found["Deployment", "rekindle-vllm"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    check_connector(container["args"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert all(("ConfigMap", source["configMapRef"]["name"]) in found for source in container["envFrom"])
    assert found["ConfigMap", "rekindle"]["data"]["REKINDLE_REDIS"].startswith("redis://rekindle-redis:")

"""The compose file and the manifests of a fleet: valid YAML whose parts refer to each other."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.fleet.tier_servers import free_ports, running
from rekindle.codec.cipher import read_secret
from rekindle.store.objects import TierFailed
from rekindle.store.sealed import SealedObjects

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
            if service.get("entrypoint") is None:
                check_connector(service["command"])
    for name in ("vllm-1", "vllm-2"):
        check_secrets(services[name]["environment"])
        assert "keys:/keys:ro" in services[name]["volumes"]


def check_secrets(environment: dict[str, str]) -> None:
    """Redis asks for a password, which is sent over TLS alone, and the tiers see encrypted KV."""
    redis = environment["REKINDLE_REDIS"]
    assert redis.startswith("rediss://:$") and "REDIS_PASSWORD" in redis
    assert environment["REKINDLE_TIER_SECRET"].endswith("/tier.secret")


def test_the_keys_and_the_redis_of_the_compose_file_serve_encrypted_objects_to_those_who_know_the_password(
    tmp_path: Path,
) -> None:
    """The script and the arguments as they stand in the file, but for the folder, the host, the port and the owner."""
    pytest.importorskip("redis", reason='needs: pip install "rekindle-llm[redis]"')
    if shutil.which("redis-server") is None or shutil.which("openssl") is None:
        pytest.skip("redis-server and openssl are needed")
    from rekindle.store.redis import RedisObjects

    services = yaml.safe_load((DEPLOY / "fleet.compose.yaml").read_text("utf-8"))["services"]
    (port,) = free_ports(1)

    def here(text: str) -> str:
        own = {"/keys": str(tmp_path), "DNS:redis": "DNS:localhost", "@redis:6379": f"@localhost:{port}"}
        own |= {"--tls-port 6379": f"--tls-port {port}", "chown 999": "ls", "8gb": "100mb"}
        text = re.sub(r"\$\{REDIS_PASSWORD:[^}]*\}", "right", text)
        for before, after in own.items():
            text = text.replace(before, after)
        return text

    (script,) = services["keys"]["command"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for _ in range(2):  # the second time nothing is made anew
        subprocess.run(["sh", "-ec", here(script)], env={**os.environ, "PATH": path}, check=True, capture_output=True)
    url = here(services["vllm-1"]["environment"]["REKINDLE_REDIS"])
    with running(shlex.split(here(services["redis"]["command"])), port):
        objects = SealedObjects(RedisObjects(url, 1 << 20), read_secret(tmp_path / "tier.secret"))
        assert objects.put("kv/a/x", b"the words of a prompt")
        assert objects.get_many(["kv/a/x"]) == [b"the words of a prompt"]
        for wrong in (url.replace(":right@", "@"), url.replace("right", "wrong")):
            with pytest.raises(TierFailed):
                RedisObjects(wrong, 1 << 20).used_bytes()


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
    own = {variable["name"]: variable.get("value", "") for variable in container["env"]}
    check_secrets({**found["ConfigMap", "rekindle"]["data"], **own})
    redis = found["Deployment", "rekindle-redis"]["spec"]["template"]["spec"]
    (container,) = redis["containers"]
    arguments = container["args"]
    assert arguments[arguments.index("--requirepass") + 1] == "$(REDIS_PASSWORD)" and "--tls-port" in arguments
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in redis["volumes"]}

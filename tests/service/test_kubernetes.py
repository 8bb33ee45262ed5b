"""docker/kubernetes: what the overlays build fits Kubernetes' schemas and the programs that it starts."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest
import yaml
from fastapi.routing import APIRoute
from redis import AuthenticationError, Redis
from redis import ConnectionError as RedisConnectionError
from redis.backoff import NoBackoff
from redis.retry import Retry

from bench.common.service import free_port, wait_for
from bus.settings import Settings, load_settings
from bus.settings_sources import CONFIG_VARIABLE, fields_of, variable_of
from gateway.operations.metrics import INSTANCE_METRICS
from gateway.operations.public import router
from gateway.service import LEFTOVERS_S
from instar.serve.redis_server import find_redis_server
from tests.support.health import healthy
from tests.support.paths import ROOT

KUBERNETES: Final = "1.34"
FOLDER: Final = ROOT / "docker" / "kubernetes"
PAGE: Final = ROOT / "docs" / "kubernetes.md"
OVERLAYS: Final = sorted(one.parent.name for one in (FOLDER / "overlays").glob("*/kustomization.yaml"))
COMPONENT: Final = "app.kubernetes.io/component"
REFERENCE: Final = re.compile(r"\$\((\w+)\)")
BUILDER: Final = ("kubectl", "kustomize") if shutil.which("kubectl") else ("kustomize", "build")

Object = dict[str, Any]

pytestmark = pytest.mark.skipif(
    not shutil.which(BUILDER[0]), reason="neither kubectl nor kustomize, which build the overlays, is on PATH"
)


@pytest.fixture(scope="module", params=[*OVERLAYS, "with the inference extension"])
def objects(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    """Return what an overlay builds, and the last one with the component that no overlay has."""
    if request.param in OVERLAYS:
        return built(FOLDER / "overlays" / request.param)
    folder = tmp_path_factory.mktemp("overlay")
    wanted = {"resources": ["overlays/gpu-nodes"], "components": ["components/inference-extension"]}
    paths = {key: [os.path.relpath(FOLDER / one, folder) for one in ones] for key, ones in wanted.items()}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(paths))
    return built(folder)


def built(folder: Path) -> list[Object]:
    done = subprocess.run((*BUILDER, str(folder)), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [one for one in objects if one["kind"] in kinds]


def templates(objects: list[Object]) -> dict[str, Object]:
    """Name of the workload -> its pods."""
    return {
        one["metadata"]["name"]: one["spec"]["template"]
        for one in of_kind(objects, "Deployment", "StatefulSet")
    }


def containers(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    for name, template in templates(objects).items():
        yield from ((name, container) for container in template["spec"]["containers"])


def environment(objects: list[Object], container: Object) -> dict[str, str]:
    """Return what the container's process sees: references as the kubelet fills them in, the rest made up."""
    maps = {one["metadata"]["name"]: one["data"] for one in of_kind(objects, "ConfigMap")}
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        found |= maps[source["configMapRef"]["name"]]
    for variable in container.get("env", ()):
        assert variable["name"] not in {one for one in found if "REDIS" in one}, variable["name"]
        if "valueFrom" in variable:
            found[variable["name"]] = made_up(variable["valueFrom"])
        else:
            missing = [name for name in REFERENCE.findall(variable["value"]) if name not in found]
            assert not missing, f"{variable['name']} refers to {missing}, which comes later or not at all"
            found[variable["name"]] = REFERENCE.sub(lambda one: found[one[1]], variable["value"])
    return found


def made_up(source: Object) -> str:
    if "fieldRef" in source:
        return {"status.podIP": "10.0.0.7", "metadata.name": "worker-0"}[source["fieldRef"]["fieldPath"]]
    return "2" if "resourceFieldRef" in source else "0123456789abcdef"


def settings_of(objects: list[Object], component: str) -> Settings:
    own = [one for name, one in containers(objects) if name == component]
    return load_settings(environ=environment(objects, own[0]))


def test_every_object_fits_the_schema_of_kubernetes(objects: list[Object]) -> None:
    for one in objects:
        if one["kind"] != "InferencePool":  # an extension's
            kubernetes_validate.validate(one, KUBERNETES, strict=True)
    kubernetes_validate.validate(yaml.safe_load((FOLDER / "fill.yaml").read_text()), KUBERNETES, strict=True)
    assert f"v{KUBERNETES}" in (FOLDER / "base" / "namespace.yaml").read_text()
    assert KUBERNETES in PAGE.read_text()


def test_a_wrong_object_does_not_fit_the_schema() -> None:
    deployment = of_kind(built(FOLDER / "base"), "Deployment")[0]
    wrong = deployment | {"spec": deployment["spec"] | {"replica": 2}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


def test_every_variable_is_a_setting_with_a_value_that_it_takes(objects: list[Object]) -> None:
    names = {variable_of(name) for name in fields_of(Settings)} | {CONFIG_VARIABLE}
    for name, container in containers(objects):
        variables = environment(objects, container)
        assert {one for one in variables if one.startswith("INSTAR_")} <= names
        settings = load_settings(environ=variables)
        assert name == "redis" or settings.redis.url == "redis://:0123456789abcdef@redis:6379/0"
    assert not settings_of(objects, "gateway").gateway.loopback_only
    assert settings_of(objects, "worker").worker.group_host == "10.0.0.7"


def test_every_worker_of_a_pod_has_a_name_of_its_own(objects: list[Object]) -> None:
    ids = [
        environment(objects, one)["INSTAR_WORKER__ID"]
        for name, one in containers(objects)
        if name == "worker"
    ]
    assert sorted(ids) == [f"worker-0-{index}" for index in range(len(ids))]


def test_programs_and_images_are_those_of_compose(objects: list[Object]) -> None:
    composed = [yaml.safe_load((ROOT / name).read_text()) for name in ("compose.yaml", "compose.gpu.yaml")]
    images = {one["image"] for file in composed for one in file["services"].values() if "image" in one}
    for name, container in containers(objects):
        assert container["image"] in images
        if name != "redis":
            assert container["command"] == ["python", "-P", "-m", name]
            assert (ROOT / name / "__main__.py").is_file()


def test_probes_ask_for_routes_and_checks_that_there_are(objects: list[Object]) -> None:
    routes = {one.path for one in router.routes if isinstance(one, APIRoute) and "GET" in (one.methods or ())}
    for name, container in containers(objects):
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container.get(kind)
            if probe and "httpGet" in probe:
                assert name == "gateway" and probe["httpGet"]["path"] in routes
                assert probe["httpGet"]["port"] in {one["name"] for one in container["ports"]}
            elif probe and name != "redis":
                *program, check = probe["exec"]["command"]
                assert program == ["python", "/opt/instar/healthy.py"]
                assert check in healthy.CHECKS
                assert probe["timeoutSeconds"] > 6, "of two calls of Redis, which give up after 3 s"
    (gateway,) = (one for name, one in containers(objects) if name == "gateway")
    assert gateway["livenessProbe"]["httpGet"]["path"] == "/health", "no outage of workers restarts it"
    worker = next(one for name, one in containers(objects) if name == "worker")
    assert worker["livenessProbe"]["exec"]["command"][-1] == "alive", "no outage of Redis restarts it"


def test_every_port_is_one_that_a_process_listens_on(objects: list[Object]) -> None:
    ports = {
        name: {one["name"]: one["containerPort"] for one in container["ports"]}
        for name, container in containers(objects)
        if "ports" in container
    }
    url = settings_of(objects, "monitor").redis.url
    assert ports == {
        "gateway": {"http": settings_of(objects, "gateway").gateway.port},
        "redis": {"redis": int(url.rpartition(":")[2].partition("/")[0])},
    }
    for service in of_kind(objects, "Service"):
        for port in service["spec"].get("ports", ()):
            assert port["targetPort"] in ports[service["metadata"]["name"]]
    annotations = templates(objects)["gateway"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(ports["gateway"]["http"])
    assert annotations["prometheus.io/path"] in {
        one.path for one in router.routes if isinstance(one, APIRoute)
    }
    assert "redis" in {one["metadata"]["name"] for one in of_kind(objects, "Service")}, (
        "its name is in the URL"
    )


def selects(selector: Object, labels: dict[str, str]) -> bool:
    wanted = selector.get("matchLabels", {})
    rules = selector.get("matchExpressions", ())
    assert all(rule["operator"] == "In" for rule in rules)
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        labels.get(rule["key"]) in rule["values"] for rule in rules
    )


def test_every_selector_selects_the_pods_of_one_workload(objects: list[Object]) -> None:
    labels = {name: one["metadata"]["labels"] for name, one in templates(objects).items()}
    selectors = {
        **{("Service", one["metadata"]["name"]): {"matchLabels": one["spec"]["selector"]}
           for one in of_kind(objects, "Service")},
        **{(one["kind"], one["metadata"]["name"]): one["spec"]["selector"]
           for one in of_kind(objects, "Deployment", "StatefulSet", "PodDisruptionBudget")},
    }  # fmt: skip
    for (kind, name), selector in selectors.items():
        assert [one for one in labels if selects(selector, labels[one])] == [name], (kind, name)
    for pool in of_kind(objects, "InferencePool"):
        assert [one for one in labels if selects(pool["spec"]["selector"], labels[one])] == ["gateway"]
        port = settings_of(objects, "gateway").gateway.port
        assert pool["spec"]["targetPorts"] == [{"number": port}]
        assert pool["spec"]["endpointPickerRef"].keys() >= {"name", "port"}


def may(objects: list[Object], source: dict[str, str], target: dict[str, str], port: int) -> bool:
    """Return True if the policies let a pod with the labels `source` call a TCP port of a `target`."""

    def permits(pod: dict[str, str], other: dict[str, str], direction: str, peers: str) -> bool:
        own = [
            one["spec"]
            for one in of_kind(objects, "NetworkPolicy")
            if selects(one["spec"]["podSelector"], pod) and direction in one["spec"]["policyTypes"]
        ]
        rules = [rule for policy in own for rule in policy.get(direction.lower(), ())]
        return not own or any(
            (peers not in rule or any(selects(peer["podSelector"], other) for peer in rule[peers]))
            and any(one["port"] <= port <= one.get("endPort", one["port"]) for one in rule["ports"])
            for rule in rules
        )

    return permits(source, target, "Egress", "to") and permits(target, source, "Ingress", "from")


def test_only_who_must_talk_may(objects: list[Object]) -> None:
    labels = {name: one["metadata"]["labels"] for name, one in templates(objects).items()}
    ports = {"redis": 6379, "gateway": 8000, "worker": 40_000, "monitor": 8000, "controller": 8000}
    allowed = {
        (source, target)
        for source, target in itertools.product(labels, repeat=2)
        if may(objects, labels[source], labels[target], ports[target])
    }
    users = {name for name, one in containers(objects) if "INSTAR_REDIS__URL" in environment(objects, one)}
    assert users == {"gateway", "monitor", "controller", "worker"}
    assert allowed == {(user, "redis") for user in users} | {("worker", "worker")}
    assert not may(objects, labels["gateway"], labels["redis"], 6380)
    assert not may(objects, labels["gateway"], labels["worker"], 40_000)


def test_a_namespace_that_is_restricted_takes_every_pod(objects: list[Object]) -> None:
    """Pods keep the security standard "restricted", and have files that nobody changes."""
    (namespace,) = of_kind(objects, "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for template in templates(objects).values():
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False, "INSTAR_... of a Service is no setting"
        assert {key for one in spec.get("volumes", ()) for key in one} <= {
            *("name", "emptyDir", "persistentVolumeClaim")
        }
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "memory" in container["resources"]["limits"]
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()


def test_a_pod_has_the_time_that_its_drain_takes(objects: list[Object]) -> None:
    pods = {name: one["spec"] for name, one in templates(objects).items()}
    gateway, worker = (settings_of(objects, name) for name in ("gateway", "worker"))
    hook = pods["gateway"]["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain_s = hook + gateway.gateway.drain_timeout_s + LEFTOVERS_S
    assert pods["gateway"]["terminationGracePeriodSeconds"] > drain_s
    drain_s = worker.worker.drain_timeout_s + worker.worker.group_timeout_s
    assert pods["worker"]["terminationGracePeriodSeconds"] > drain_s


def test_no_manifest_has_a_secret_and_the_page_makes_those_that_are_named(objects: list[Object]) -> None:
    assert not of_kind(objects, "Secret")
    named = {
        (variable["valueFrom"]["secretKeyRef"]["name"], variable["valueFrom"]["secretKeyRef"]["key"])
        for _, container in containers(objects)
        for variable in container.get("env", ())
        if "secretKeyRef" in variable.get("valueFrom", ())
    }
    assert named == {("instar-redis", "password"), ("instar-keys", "api"), ("instar-keys", "admin")}
    made = {
        (command[1], key)
        for command in re.finditer(r"create secret generic (\S+)((?: .*\\\n)*.*)", PAGE.read_text())
        for key in re.findall(r"--from-literal=(\w+)=", command[2])
    }
    assert made == named
    holders = {
        name for name, one in containers(objects) if "INSTAR_GATEWAY__API_KEYS" in environment(objects, one)
    }
    assert holders == {"gateway"}, "keys are the gateways' alone"


def test_autoscalers_and_the_adapter_read_a_metric_that_there_is(objects: list[Object]) -> None:
    metrics = {f"instar_{one.entry.name}": one.entry for one in INSTANCE_METRICS}
    for scaler in of_kind(objects, "HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        (workload,) = (
            one for one in of_kind(objects, target["kind"]) if one["metadata"]["name"] == target["name"]
        )
        assert "replicas" not in workload["spec"], "the next `apply` would undo what the autoscaler did"
        (metric,) = scaler["spec"]["metrics"]
        assert not metrics[metric["external"]["metric"]["name"]].is_counter
    adapter = yaml.safe_load((FOLDER / "components" / "autoscaling" / "prometheus-adapter.yaml").read_text())
    (rule,) = adapter["rules"]["external"]
    assert re.findall(r'__name__="(\w+)"', rule["seriesQuery"]) == [rule["name"]["as"]]
    assert rule["name"]["as"] in metrics
    readers = {"num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info"}
    assert readers <= {one.entry.name for one in INSTANCE_METRICS if one.entry.routers_read}
    if of_kind(objects, "InferencePool"):
        assert settings_of(objects, "gateway").gateway.metrics_compat == "vllm"
        assert "vllm" in templates(objects)["gateway"]["metadata"]["labels"].values()


def test_the_page_names_every_overlay() -> None:
    assert OVERLAYS and all(f"overlays/{one}" in PAGE.read_text() for one in OVERLAYS)


def test_the_script_of_redis_asks_for_the_password_and_keeps_what_was_written(tmp_path: Path) -> None:
    container = next(one for name, one in containers(built(FOLDER / "base")) if name == "redis")
    *shell, script = container["command"]
    port, password, once = free_port(), "0123456789abcdef", Retry(NoBackoff(), 0)
    here = f"dir {tmp_path}\nbind 127.0.0.1\nport {port}"
    script = script.replace("redis-server", str(find_redis_server())).replace("dir /data", here)
    for expected in (None, b"kept"):
        process = subprocess.Popen(
            (*shell, script), env=os.environ | {"REDISCLI_AUTH": password}, stdout=subprocess.DEVNULL
        )
        try:
            with Redis(port=port, password=password, retry=once) as client:
                wait_for("Redis to answer", lambda: answers(client))
                assert client.get("key") == expected
                client.set("key", "kept")
            with Redis(port=port, retry=once) as stranger, pytest.raises(AuthenticationError):
                stranger.ping()
        finally:
            process.terminate()
            process.wait(10)


def answers(client: Redis) -> bool:
    try:
        return bool(client.ping())
    except RedisConnectionError:
        return False

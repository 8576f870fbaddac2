"""What people run into with Ray on Kubernetes, each as an invariant over all examples."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.helm.chart import (
    CHART,
    EXAMPLES,
    LONGEST,
    MONITORING,
    Object,
    container,
    groups,
    objects,
    only,
    pods,
    variables,
)

DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


@pytest.fixture(params=EXAMPLES)
def found(request: Any) -> list[Object]:
    """All objects of an example."""
    return objects(request.param, apis=MONITORING)


def workers(found: list[Object]) -> dict[str, Object]:
    """Groups but the head and the gateways."""
    return {name: group for name, group in groups(found).items() if name not in ("head", "gateway")}


@pytest.mark.parametrize("name", ["a", "1st", "a.b", LONGEST, "x" * 40])
def test_names_are_short_enough(name: str) -> None:
    for one in objects("cpu-sim", name=name):
        limit = {"RayCluster": 41, "RayJob": 47}.get(one["kind"], 63)  # a cluster's has -head-svc behind it, within 50
        assert len(one["metadata"]["name"]) <= limit
        assert DNS_1035.fullmatch(one["metadata"]["name"])


def test_long_names_stay_apart() -> None:
    names = {only(objects(name="r" * 50 + end), "RayCluster")["metadata"]["name"] for end in ("ab", "ac")}
    assert len(names) == 2


def test_no_service_links(found: list[Object]) -> None:
    assert all(pod["spec"]["enableServiceLinks"] is False for _, pod in pods(found))


def test_pods_are_as_the_restricted_standard_wants_them(found: list[Object]) -> None:
    for _, pod in pods(found):
        security = container(pod)["securityContext"]
        assert security["runAsNonRoot"]
        assert security["runAsUser"] > 0
        assert security["readOnlyRootFilesystem"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert not security["allowPrivilegeEscalation"]
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}


def test_nobody_gets_a_token_but_the_autoscaler(found: list[Object]) -> None:
    autoscaled = only(found, "RayCluster")["spec"]["enableInTreeAutoscaling"]
    with_token = {name for name, pod in pods(found) if pod["spec"]["automountServiceAccountToken"]}
    assert with_token == ({"group head"} if autoscaled else set())


def test_the_autoscalers_account_is_the_heads_alone() -> None:
    """KubeRay gives the head's account the right to make pods."""
    spec = groups(objects("ha"))
    assert "serviceAccountName" not in spec["head"]["template"]["spec"]
    assert "serviceAccountName" in spec["prefill"]["template"]["spec"]


def test_no_restart_policy_in_the_cluster(found: list[Object]) -> None:
    """The autoscaler wants to set it."""
    assert all("restartPolicy" not in group["template"]["spec"] for group in groups(found).values())


def test_no_chart_version_in_pod_templates(found: list[Object]) -> None:
    for _, pod in pods(found):
        assert not {"helm.sh/chart", "app.kubernetes.io/version"} & set(pod["metadata"]["labels"])
        assert {"name", "instance", "component", "part-of"} <= {
            label.removeprefix("app.kubernetes.io/") for label in pod["metadata"]["labels"]
        }


def test_shared_memory_has_a_size_of_its_own(found: list[Object]) -> None:
    for group in groups(found).values():
        (shm,) = [one for one in group["template"]["spec"]["volumes"] if one["name"] == "shm"]
        assert shm["emptyDir"]["medium"] == "Memory"
        assert shm["emptyDir"]["sizeLimit"]
        assert {"name": "shm", "mountPath": "/dev/shm"} in container(group["template"])["volumeMounts"]


def test_nothing_but_ray_runs_on_the_head(found: list[Object]) -> None:
    head = groups(found)["head"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    annotations = head["template"]["metadata"]["annotations"]
    assert annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"


def test_each_pod_takes_one_actor_of_its_kind(found: list[Object]) -> None:
    config = yaml.safe_load(config_of(found))
    for name, group in groups(found).items():
        if name != "head":
            kind = group["template"]["metadata"]["labels"]["app.kubernetes.io/component"]
            assert group["rayStartParams"]["resources"] == f"""'{{"{kind}": 1}}'"""
            assert config[kind]["resources"][kind] == 1
            assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for kind in ("prefill", "decode", "both"):
        pods_of = [
            group["replicas"]
            for group in workers(found).values()
            if group["template"]["metadata"]["labels"]["app.kubernetes.io/component"] == kind
        ]
        assert config[kind]["replicas"] == sum(pods_of)


def test_nodes_announce_the_address_of_their_pod(found: list[Object]) -> None:
    for name, group in groups(found).items():
        assert variables(group["template"])["POD_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
        if name != "head":
            assert group["rayStartParams"]["node-ip-address"] == "$POD_IP"
    assert "host" not in yaml.safe_load(config_of(found)).get("gossip", {})


def test_the_hub_token_is_in_every_pod_that_loads() -> None:
    for group in groups(objects("gpu-rdma")).values():
        assert variables(group["template"])["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}


def test_devices_are_whole_and_equal() -> None:
    for group in workers(objects("gpu-rdma")).values():
        resources = container(group["template"])["resources"]
        for device in ("nvidia.com/gpu", "rdma/hca_shared_devices_a"):
            assert resources["limits"][device] == resources["requests"][device] == "1"


def test_gateways_and_head_have_no_devices() -> None:
    found = groups(objects("gpu-rdma"))
    for name in ("head", "gateway"):
        assert not {"nvidia.com/gpu"} & set(container(found[name]["template"])["resources"]["limits"])


def test_a_group_can_differ_from_the_defaults() -> None:
    """Also where its value is one that means nothing: 0 is not "unset"."""
    found = groups(objects("gpu-rdma", {"workers.decode.gpu": 0, "tiers.host": "1GiB"}))
    assert "nvidia.com/gpu" not in container(found["decode"]["template"])["resources"]["limits"]


def test_workers_can_lock_memory_as_root_if_told_to() -> None:
    found = groups(objects("gpu-rdma", {"kvTransfer.rdma.memlock": "root"}))
    assert container(found["prefill"]["template"])["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert container(found["prefill"]["template"])["securityContext"]["runAsUser"] == 0
    assert container(found["gateway"]["template"])["securityContext"]["runAsUser"] == 1000


def test_liveness_does_not_look_at_the_model(found: list[Object]) -> None:
    """A model may take an hour to load."""
    for name, group in groups(found).items():
        if name != "head":
            one = container(group["template"])
            assert one["livenessProbe"]["httpGet"] == {"path": "/api/local_raylet_healthz", "port": 52365}
            assert one["startupProbe"]


def test_ready_is_what_serves(found: list[Object]) -> None:
    gateway = container(groups(found)["gateway"]["template"])
    assert gateway["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert gateway["ports"] == [{"name": "http", "containerPort": yaml.safe_load(config_of(found))["gateway"]["port"]}]
    for group in workers(found).values():
        probe = container(group["template"])["startupProbe"]
        assert probe["exec"]["command"] == ["python", "/etc/headwater/serving.py"]
        assert probe["failureThreshold"] * probe["periodSeconds"] >= 1800


def test_probes_speak_tls_where_gateways_do() -> None:
    def scheme(example: str) -> str | None:
        gateway = container(groups(objects(example))["gateway"]["template"])
        return gateway["readinessProbe"]["httpGet"].get("scheme")

    assert scheme("locked-down") == "HTTPS"
    assert scheme("default") is None


def test_pods_drain_before_they_end(found: list[Object]) -> None:
    for name, group in groups(found).items():
        if name == "head":
            continue
        shell, _, command = container(group["template"])["lifecycle"]["preStop"]["exec"]["command"]
        lingers, drains = map(int, re.findall(r"(?:sleep|timeout) (\d+)", command))
        assert shell == "/bin/sh", "only a shell replaces $POD_IP there"
        assert 'headwater drain --node "$POD_IP"' in command
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] > lingers + drains
        config = yaml.safe_load(config_of(found))
        assert drains > config["gateway" if name == "gateway" else "worker"]["drain_s"]
        if name == "gateway":
            assert lingers >= 5, "addresses go from the lists first"


def test_one_pod_of_a_kind_is_disrupted_at_a_time(found: list[Object]) -> None:
    budgets = [one["spec"] for one in found if one["kind"] == "PodDisruptionBudget"]
    assert all(one["maxUnavailable"] == 1 for one in budgets)
    covered = {one["selector"]["matchLabels"]["app.kubernetes.io/component"] for one in budgets}
    kinds = {group["template"]["metadata"]["labels"]["app.kubernetes.io/component"] for group in groups(found).values()}
    assert covered == kinds - {"head"}


def test_selectors_find_their_pods(found: list[Object]) -> None:
    labels = [pod["metadata"]["labels"] for _, pod in pods(found)]
    for one in found:
        if one["kind"] == "Service":
            selector = one["spec"]["selector"]
        elif one["kind"] in ("PodDisruptionBudget", "PodMonitor"):
            selector = one["spec"]["selector"]["matchLabels"]
        elif one["kind"] == "NetworkPolicy":
            selector = one["spec"]["podSelector"]["matchLabels"]
        else:
            continue
        assert any(selector.items() <= those.items() for those in labels)


def test_keys_may_change_while_gateways_run() -> None:
    """A file mounted by `subPath` would never change."""
    for group in groups(objects("locked-down")).values():
        assert all("subPath" not in mount for mount in container(group["template"])["volumeMounts"])
    found = groups(objects("locked-down"))
    for name, mounted in {"head": True, "gateway": True, "prefill": False}.items():
        paths = {mount["mountPath"] for mount in container(found[name]["template"])["volumeMounts"]}
        assert ("/etc/headwater-keys" in paths) == mounted


def test_no_secret_is_written(found: list[Object]) -> None:
    assert not [one for one in found if one["kind"] == "Secret"]
    for _, pod in pods(found):
        for variable in container(pod).get("env", []):
            assert not re.search("TOKEN$|KEY$|PASSWORD$", variable["name"]) or "valueFrom" in variable


def test_volumes_and_mounts_agree(found: list[Object]) -> None:
    for name, pod in pods(found):
        volumes = {one["name"] for one in pod["spec"]["volumes"]}
        assert {mount["name"] for mount in container(pod)["volumeMounts"]} == volumes, name


def test_gateways_share_the_directory_of_batches() -> None:
    pod = groups(objects("ha"))["gateway"]["template"]
    text = next(files["headwater.yaml"] for one in objects("ha") if "headwater.yaml" in (files := one.get("data", {})))
    path = yaml.safe_load(text)["gateway"]["batch_path"]
    name = next(one["name"] for one in container(pod)["volumeMounts"] if one["mountPath"] == path)
    volume = next(one for one in pod["spec"]["volumes"] if one["name"] == name)
    assert volume["persistentVolumeClaim"] == {"claimName": "batches"}


def test_weights_stay_when_the_release_goes() -> None:
    claim = only(objects("gpu-rdma"), "PersistentVolumeClaim")
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_cpu_workers_take_the_threads_of_their_limit() -> None:
    """A process sees all cores of its machine."""

    def threads(limit: Any) -> Any:
        values = {"workerDefaults.resources.limits.cpu": limit}
        return yaml.safe_load(config_of(objects("default", values)))["worker"]["threads"]

    assert [threads(limit) for limit in ("4", 3, "2500m", "500m")] == [4, 3, 2, 1]
    assert "threads" not in yaml.safe_load(config_of(objects("gpu-rdma")))["worker"]


def test_policies_let_in_nobody_else() -> None:
    policies = {
        one["metadata"]["name"]: one["spec"] for one in objects("locked-down") if one["kind"] == "NetworkPolicy"
    }
    everything = policies["test-headwater"]
    assert everything["policyTypes"] == ["Ingress", "Egress"]
    assert all(rule.get("from") for spec in policies.values() for rule in spec["ingress"])
    assert [rule["ports"] for rule in policies["test-headwater-gateway"]["ingress"]] == [
        [{"port": "http", "protocol": "TCP"}]
    ]
    workers = policies["test-headwater-worker"]
    assert workers["podSelector"]["matchExpressions"][0]["values"] == ["prefill", "decode", "both"]
    assert [rule["ports"] for rule in workers["ingress"]] == [[{"port": "metrics", "protocol": "TCP"}]]
    ports = [rule.get("ports") for rule in everything["egress"] if "to" not in rule]
    assert ports == [[{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]]


def test_ray_asks_for_a_token_unless_told_not_to(found: list[Object]) -> None:
    assert only(found, "RayCluster")["spec"]["authOptions"]["mode"] == "token"
    for name, pod in pods(found):
        if name != "Pod":
            assert variables(pod)["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]["key"] == "auth_token"


def test_notes_warn_of_open_gateways() -> None:
    notes = (CHART / "templates" / "NOTES.txt").read_text()
    assert "not .Values.gateway.apiKeys.existingSecret" in notes


def config_of(found: list[Object]) -> str:
    """Headwater's configuration among the objects."""
    return next(one["data"]["headwater.yaml"] for one in found if "headwater.yaml" in one.get("data", {}))

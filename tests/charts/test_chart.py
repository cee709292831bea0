"""The Helm chart: what it makes of which values, and that it says nothing but what is so."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from baton_api import __version__
from baton_operator import chart
from baton_operator.chart import CLUSTER, SERVICES, own, rules
from baton_operator.crd import RESOURCES
from baton_operator.manifests import pods
from baton_operator.settings import OperatorSettings
from tests.charts.helm import CHART, NAMESPACE, ROOT, VALUES, helm, of_kind, render

TEMPLATES = "\n".join(path.read_text() for path in sorted((CHART / "templates").rglob("*")) if path.is_file())
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def leaves(values: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Paths of values; an object that is written as a whole (resources, affinity) is one."""
    for name, value in values.items():
        path = f"{above}.{name}" if above else name
        described = schema_of(path)
        if isinstance(value, dict) and "properties" in described and name != "resources":
            yield from leaves(value, path)
        else:
            yield path


def schema_of(path: str) -> dict[str, Any]:
    part: dict[str, Any] = SCHEMA
    for name in path.split("."):
        part = part["properties"][name]
    return part


class TestValues:
    def test_values_match_the_schema(self) -> None:
        def same(values: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> None:
            if not schema.get("properties") or path == "resources":
                return
            assert schema["additionalProperties"] is False, path
            assert set(values) == set(schema["properties"]) - {"global"}, path
            for name, value in values.items():
                same(value, schema["properties"][name], f"{path}.{name}".lstrip("."))

        same(DEFAULTS, SCHEMA, "")
        Draft202012Validator.check_schema(SCHEMA)

    @pytest.mark.parametrize("path", list(leaves(DEFAULTS)))
    def test_value_is_used_in_a_template(self, path: str) -> None:
        ways = [path.split(".")[:length] for length in range(1, path.count(".") + 2)]
        used = any(re.search(rf"\.Values\.{'.'.join(map(re.escape, way))}\b", TEMPLATES) for way in ways)
        image = re.fullmatch(r"images\.(\w+)\.(\w+)", path)
        if image is not None:
            name, field = image.groups()
            used = f'"image" "{name}"' in TEMPLATES and f"$image.{field}" in TEMPLATES
        assert used

    def test_values_have_comments(self) -> None:
        lines = (CHART / "values.yaml").read_text().splitlines()
        for path in leaves(DEFAULTS):
            name, indent = path.rpartition(".")[2], "  " * path.count(".")
            lines_of_field = [at for at, line in enumerate(lines) if line.startswith(f"{indent}{name}:")]
            assert any(lines[at - 1].startswith(f"{indent}#") for at in lines_of_field), path

    @pytest.mark.parametrize(
        ("values", "named"),
        [
            ({"replica": 3}, "replica"),
            ({"images": {"operator": {"tags": "1"}}}, "tags"),
            ({"watch": {"namespace": ["a"]}}, "namespace"),
            ({"watch": {"namespaces": "a"}}, "/watch/namespaces"),
            ({"watch": {"namespaces": ["A_b"]}}, "/watch/namespaces/0"),
            ({"replicas": "two"}, "/replicas"),
            ({"replicas": -1}, "/replicas"),
            ({"concurrency": 0}, "/concurrency"),
            ({"images": {"pullPolicy": "Sometimes"}}, "/images/pullPolicy"),
            ({"images": {"worker": {"digest": "abc"}}}, "/images/worker/digest"),
            ({"metrics": {"port": 80}}, "/metrics/port"),
            ({"podDisruptionBudget": {"maxUnavailable": 0}}, "/podDisruptionBudget/maxUnavailable"),
            ({"fullnameOverride": "a" * 41}, "/fullnameOverride"),
            ({"podLabels": {"a": 1}}, "/podLabels/a"),
            ({"networkPolicy": {"apiServerPorts": []}}, "/networkPolicy/apiServerPorts"),
            ({"mutualTls": {"issuer": "own"}}, "/mutualTls/issuer"),
            ({"topologySpreadConstraints": [{"topologyKey": "a"}]}, "/topologySpreadConstraints/0"),
        ],
        ids=str,
    )
    def test_values_invalid_value_is_rejected_and_named(self, values: dict[str, Any], named: str) -> None:
        done = helm("template", "baton", str(CHART), values=values)
        assert done.returncode != 0
        assert named in done.stderr.replace("'", "").replace(".", "/")


@pytest.mark.parametrize("values", list(VALUES.values()), ids=list(VALUES))
class TestEverySet:
    def test_helm_finds_nothing_wrong(self, values: dict[str, Any]) -> None:
        done = helm("lint", "--strict", str(CHART), values=values)
        assert done.returncode == 0, done.stdout

    def test_chart_objects_are_unique(self, values: dict[str, Any]) -> None:
        names = [
            (one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in render(values)
        ]
        assert len(names) == len(set(names))

    def test_chart_operator_flags_are_settings(self, values: dict[str, Any]) -> None:
        (deployment,) = of_kind(render(values), "Deployment")
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        command, *flags = container["args"]
        given = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
        settings = OperatorSettings(**{name.replace("-", "_"): value for name, value in given.items()})
        assert command == "operator"
        assert settings.worker_image and settings.router_image
        assert settings.host == "0.0.0.0"  # otherwise kubelets could not probe its health
        assert settings.port == container["ports"][0]["containerPort"]
        assert settings.lease_namespace == NAMESPACE

    def test_all_that_is_asked_of_the_operator_goes_to_its_pods(self, values: dict[str, Any]) -> None:
        manifests = render(values, "--api-versions=monitoring.coreos.com/v1/ServiceMonitor")
        (deployment,) = of_kind(manifests, "Deployment")
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        (service,) = of_kind(manifests, "Service")
        selectors = [deployment["spec"]["selector"]["matchLabels"], service["spec"]["selector"]]
        selectors += [
            one["spec"]["selector"]["matchLabels"] for one in of_kind(manifests, "PodDisruptionBudget")
        ]
        selectors += [
            one["spec"]["podSelector"]["matchLabels"] for one in of_kind(manifests, "NetworkPolicy")
        ]
        for selector in selectors:
            assert selector.items() <= labels.items()
        for monitor in of_kind(manifests, "ServiceMonitor"):
            selector = monitor["spec"]["selector"]["matchLabels"]
            assert selector.items() <= service["metadata"]["labels"].items()


class TestRights:
    def test_chart_cluster_rights_are_the_operators(self) -> None:
        manifests = render({})
        assert rules((*SERVICES, *CLUSTER)) in [one["rules"] for one in of_kind(manifests, "ClusterRole")]
        (lease,) = of_kind(manifests, "Role")
        assert lease["metadata"]["namespace"] == NAMESPACE
        assert lease["rules"] == rules(own("baton-operator"))
        (bound,) = of_kind(manifests, "ClusterRoleBinding")
        assert bound["roleRef"]["name"] == "baton-operator"

    def test_in_namespaces_there_is_none_for_the_cluster(self) -> None:
        manifests = render(VALUES["two namespaces"])
        roles = {one["metadata"]["namespace"]: one["rules"] for one in of_kind(manifests, "Role")}
        assert roles == {
            NAMESPACE: rules(own("baton-operator")),
            "models": rules(SERVICES),
            "more-models": rules(SERVICES),
        }
        assert not of_kind(manifests, "ClusterRoleBinding")
        names = {one["metadata"]["name"] for one in of_kind(manifests, "ClusterRole")}
        assert names == {"baton-edit", "baton-view"}, "for people, and bound to nobody here"

    def test_all_are_given_to_the_account_of_the_pods(self) -> None:
        for values in VALUES.values():
            manifests = render(values)
            (deployment,) = of_kind(manifests, "Deployment")
            account = deployment["spec"]["template"]["spec"]["serviceAccountName"]
            bindings = [*of_kind(manifests, "RoleBinding"), *of_kind(manifests, "ClusterRoleBinding")]
            for binding in bindings:
                (subject,) = binding["subjects"]
                assert (subject["name"], subject["namespace"]) == (account, NAMESPACE)

    def test_docs_list_every_right_with_its_reason(self) -> None:
        text = (ROOT / "docs" / "guides" / "operator-permissions.md").read_text()
        for rule in (*SERVICES, *CLUSTER, *own("baton-operator")):
            resources = ", ".join(f"`{name}`" for name in rule.resources)
            assert f"| {resources} | {', '.join(rule.verbs)} | {rule.why} |" in text


class TestCustomResources:
    def test_they_stay_when_the_release_goes(self) -> None:
        definitions = of_kind(render({}), "CustomResourceDefinition")
        assert len(definitions) == len(RESOURCES)
        for one in definitions:
            assert one["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
        written = [yaml.safe_load(path.read_text()) for path in (ROOT / "crds").glob("*.yaml")]
        by_name = {one["metadata"]["name"]: one for one in definitions}
        assert by_name == {one["metadata"]["name"]: one for one in written}

    def test_chart_generated_files_are_current(self) -> None:
        assert {name: (CHART / name).read_text() for name in chart.generated()} == chart.generated()


def test_chart_pods_have_the_operators_security() -> None:
    manifests = render({})
    (deployment,), (test,) = of_kind(manifests, "Deployment"), of_kind(manifests, "Pod", tests=True)
    wanted = pods.identity("", [])["securityContext"]
    del wanted["fsGroup"], wanted["fsGroupChangePolicy"]  # there is no volume of others
    for pod in (deployment["spec"]["template"]["spec"], test["spec"]):
        assert pod["securityContext"] == wanted
        assert [one["securityContext"] for one in pod["containers"]] == [pods.container_security()]


def test_chart_monitor_is_made_only_if_the_api_exists() -> None:
    assert not of_kind(render({}), "ServiceMonitor")
    api_flag = "--api-versions=monitoring.coreos.com/v1/ServiceMonitor"
    (monitor,) = of_kind(render(VALUES["everything"], api_flag), "ServiceMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"


@pytest.mark.parametrize(("registry", "said"), [("", True), ("registry.example/team", False)])
def test_notes_say_where_images_without_a_registry_come_from(registry: str, said: bool) -> None:
    values = {"images": {"registry": registry}}
    words = ("install", "baton", str(CHART), "--dry-run=client", "--namespace=n")
    notes = helm(*words, values=values).stdout.partition("NOTES:")[2]
    assert ("images.registry is not set" in notes) is said
    assert (f"baton-worker:{__version__}" in notes) is said


def test_images_are_of_the_charts_version() -> None:
    described = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert described["appVersion"] == __version__
    assert described["version"] == __version__.replace(".dev", "-dev")  # Helm wants semantic versions
    (deployment,) = of_kind(render({}), "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"baton-operator:{__version__}"
    (deployment,) = of_kind(render(VALUES["everything"]), "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry.example/team/baton-operator:1.2.3"
    assert f"--router-image=registry.example/team/other-router:{__version__}" in container["args"]
    assert f"--worker-image=registry.example/team/baton-worker@sha256:{'ab' * 32}" in container["args"]


@pytest.mark.parametrize("namespaces", [[], ["models"]], ids=["cluster", "one namespace"])
def test_notes_can_be_pasted_into_a_shell(namespaces: list[str]) -> None:
    """A shell takes the end of a here-document only at the beginning of a line."""
    arguments = ["install", "baton", str(CHART), "--dry-run=client", "-o", "json"]
    done = helm(*arguments, values={"watch": {"namespaces": namespaces}})
    notes: str = json.loads(done.stdout)["info"]["notes"]
    pasted = "kubectl apply" + notes.partition("kubectl apply")[2].partition("Pods of")[0]
    shell = subprocess.run(
        ["bash", "-c", f'kubectl() {{ echo "# kubectl $*"; [ "$1" != apply ] || cat; }}\n{pasted}'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not shell.stderr and yaml.safe_load(shell.stdout) == yaml.safe_load(
        (ROOT / "examples" / "minimal.yaml").read_text()
    )
    commands = re.findall(r"kubectl (?:apply|wait|get|port-forward)\b.*", notes)
    of_services = [one for one in commands if "get pods" not in one]
    assert len(of_services) == 4 and all((" -n models" in one) is bool(namespaces) for one in of_services)

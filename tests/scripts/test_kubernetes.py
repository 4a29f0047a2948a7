"""The manifests of docs/kubernetes.md: valid by Kubernetes' schemas, with command lines that `bert` accepts."""

import re
from typing import Any

import pytest
import yaml
from support.command_lines import ROOT, load_command

from bert_cli.errors import CheckpointError, ConfigError, DataError

validator = pytest.importorskip("kubernetes_validate")

PAGE = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
MANIFESTS = [yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)]
BY_NAME = {(one["kind"], one["metadata"]["name"]): one for one in MANIFESTS}
JOBS = [one for one in MANIFESTS if one["kind"] == "Job"]


def container_of(job: dict[str, Any]) -> dict[str, Any]:
    (only,) = job["spec"]["template"]["spec"]["containers"]
    return only


def test_kubernetes_accepts_the_manifests_and_their_parts_fit_together():
    for manifest in MANIFESTS:
        validator.validate(manifest, "1.37", strict=True)
    claims = {name for kind, name in BY_NAME if kind == "PersistentVolumeClaim"}
    for job in JOBS:
        spec, pod, container = job["spec"], job["spec"]["template"]["spec"], container_of(job)
        volumes = {one["name"]: one["persistentVolumeClaim"]["claimName"] for one in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
        assert set(volumes.values()) <= claims
        rules = spec.get("podFailurePolicy", {}).get("rules", [])
        assert pod["restartPolicy"] == ("Never" if rules else "OnFailure")
        if rules:
            # The first rule with a code decides.
            actions = {
                code: rule["action"]
                for rule in reversed(rules)
                for code in rule.get("onExitCodes", {}).get("values", [])
            }
            mistakes = {kind.exit_code for kind in (ConfigError, DataError, CheckpointError)}
            assert {code for code, action in actions.items() if action == "FailJob"} == mistakes
            assert actions[75] == "Ignore" and "--exit-code-when-stopped=75" in container["args"]
            assert pod["terminationGracePeriodSeconds"] > 30  # 30 are the default


def test_the_pods_of_a_run_have_the_names_in_its_flags():
    job, service = BY_NAME["Job", "bert-many"], BY_NAME["Service", "bert-many"]
    spec, name = job["spec"], job["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert spec["parallelism"] == spec["completions"] and spec["completionMode"] == "Indexed"
    (port,) = [one["containerPort"] for one in container_of(job)["ports"]]
    subdomain = service["metadata"]["name"]
    workers = [f"{name}-{n}.{subdomain}:{port}" for n in range(spec["completions"])]
    assert f"--cluster.workers={','.join(workers)}" in container_of(job)["args"]


def test_bert_accepts_the_command_of_every_container():
    for job in JOBS:
        container = container_of(job)
        assert container["command"] == ["bert"]
        for index in range(job["spec"].get("completions", 1)):
            numbered = ("$(JOB_COMPLETION_INDEX)", str(index))
            words = [word.replace(*numbered) for word in container["args"]]
            assert "$(" not in " ".join(words)
            settings = load_command(words)
            if job["spec"].get("completionMode") == "Indexed":
                assert settings.cluster.rank == index

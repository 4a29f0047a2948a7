"""The manifests of docs/clusters.md: valid by Kubernetes' schemas, and their command lines run as in pods."""

import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.bert import Process, start_bert
from support.processes import wait_for
from support.stand_in import ROOT, STEPS, TINY, begun, load_command

from bert_cli.errors import CheckpointError, ConfigError, DataError
from bert_cli.train.history import Run

validator = pytest.importorskip("kubernetes_validate")

PAGE = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
MANIFESTS = [yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)]
BY_NAME = {(one["kind"], one["metadata"]["name"]): one for one in MANIFESTS}
JOBS = [one for one in MANIFESTS if one["kind"] == "Job"]
NO_CONFIG = dict.fromkeys(("config", "dataset-dir", "parallel.layout"))


def container_of(job: dict[str, Any]) -> dict[str, Any]:
    (only,) = job["spec"]["template"]["spec"]["containers"]
    return only


def words_of(job: dict[str, Any], variables: dict[str, str]) -> list[str]:
    """The command line of a container: `$(NAME)` is filled in as Kubernetes does, and nothing else."""
    container = container_of(job)
    words = [*container["command"], *container["args"]]
    return [re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], word) for word in words]


def variables_of(job: dict[str, Any], index: int) -> dict[str, str]:
    """Return the variables that Kubernetes sets in a container of a Job."""
    indexed = job["spec"].get("completionMode") == "Indexed"
    return {"JOB_COMPLETION_INDEX": str(index)} if indexed else {}


def faults(manifest: dict[str, Any]) -> list[str]:
    """Return what a cluster would not accept, and what would fail there."""
    try:
        validator.validate(manifest, "1.37", strict=True)
    except validator.ValidationError as error:
        return [str(error)]
    if manifest["kind"] != "Job":
        return []
    wrong, spec, pod = [], manifest["spec"], manifest["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    wrong += [
        f"volume {mount['name']} does not exist"
        for mount in container_of(manifest)["volumeMounts"]
        if mount["name"] not in volumes
    ]
    claims = {name for kind, name in BY_NAME if kind == "PersistentVolumeClaim"}
    wrong += [
        f"the claim of volume {name} does not exist"
        for name, volume in volumes.items()
        if volume["persistentVolumeClaim"]["claimName"] not in claims
    ]
    rules = spec.get("podFailurePolicy", {}).get("rules", [])
    if rules and pod["restartPolicy"] != "Never":
        wrong.append("a podFailurePolicy needs restartPolicy Never")
    if not rules and pod["restartPolicy"] != "OnFailure":
        wrong.append("a pod that fails is not started again")
    actions = {
        code: rule["action"]
        for rule in reversed(rules)
        for code in rule.get("onExitCodes", {}).get("values", [])
    }
    mistakes = {kind.exit_code for kind in (ConfigError, DataError, CheckpointError)}
    stopped = re.findall(
        r"--exit-code-when-stopped=(\d+)", " ".join(container_of(manifest)["args"])
    )
    if rules and {c for c, action in actions.items() if action == "FailJob"} != mistakes:
        wrong.append("the Job does not fail at exactly the codes of mistakes")
    if rules and not (stopped and actions.get(int(stopped[0])) == "Ignore"):
        wrong.append("a stopped run ends the Job or counts as a failure")
    if rules and "terminationGracePeriodSeconds" not in pod:
        wrong.append("30 seconds for a checkpoint")
    return wrong


def test_kubernetes_accepts_the_manifests():
    for manifest in MANIFESTS:
        assert faults(manifest) == [], manifest["metadata"]["name"]


def test_a_mistake_in_a_manifest_is_found():
    text = yaml.safe_dump(BY_NAME["Job", "bert-many"])
    for old, new, fault in (
        ("parallelism:", "paralelism:", "paralelism"),
        ("restartPolicy: Never", "restartPolicy: OnFailure", "a podFailurePolicy needs"),
        ("claimName: ", "claimName: no-", "the claim of volume"),
        ("terminationGracePeriodSeconds", "activeDeadlineSeconds", "30 seconds for a checkpoint"),
        ("action: FailJob", "action: Ignore", "the Job does not fail at exactly"),
        (
            "--exit-code-when-stopped=75",
            "--exit-code-when-stopped=76",
            "a stopped run ends the Job",
        ),
    ):
        assert old in text
        assert any(fault in one for one in faults(yaml.safe_load(text.replace(old, new)))), fault


def test_the_pods_of_a_run_have_the_names_in_its_flags():
    job, service = BY_NAME["Job", "bert-many"], BY_NAME["Service", "bert-many"]
    spec, name = job["spec"], job["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert spec["parallelism"] == spec["completions"] and spec["completionMode"] == "Indexed"
    (port,) = [one["containerPort"] for one in container_of(job)["ports"]]
    workers = [
        f"{name}-{n}.{service['metadata']['name']}:{port}" for n in range(spec["completions"])
    ]
    assert f"--cluster.workers={','.join(workers)}" in container_of(job)["args"]


def test_bert_accepts_the_command_of_every_container():
    for job in JOBS:
        for index in range(job["spec"].get("completions", 1)):
            program, *words = words_of(job, variables_of(job, index))
            assert program == "bert"
            load_command(words)


@pytest.fixture
def pods():
    started: list[Process] = []
    yield started
    for pod in started:
        pod.kill()
        pod.wait()


def start(job: dict[str, Any], index: int, pods: list, folder: Path, **changed: object) -> Any:
    """Start the process of a pod: the command line of the Job with the sizes of a tiny run."""
    variables = variables_of(job, index)
    replicas = job["spec"].get("completions", 1)
    sizes = {"global-batch.replicas": replicas, "total-num-train-samples": 2 * replicas * STEPS}
    flags = {**NO_CONFIG, **TINY, **sizes, "save-ckpt-path": folder / "run", **changed}
    names = tuple(f"--{name}=" for name in flags)
    words = [word for word in words_of(job, variables)[1:] if not word.startswith(names)]
    words += [f"--{name}={value}" for name, value in flags.items() if value is not None]
    log = folder / f"pod_{len(pods)}"
    with log.open("w") as file:
        pod = start_bert(
            *words, "--generated-dataset",
            env={**os.environ, **variables}, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    pod.log = log.read_text  # type: ignore[attr-defined]
    pods.append(pod)
    return pod


@pytest.mark.tensorflow
def test_preempted_pods_save_and_their_successors_complete_the_job(pods, tmp_path):
    job = BY_NAME["Job", "bert-many"]
    count = job["spec"]["completions"]

    def start_all() -> list:
        # This host instead of theirs, with a port for each.
        servers = [socket.create_server(("localhost", 0)) for _ in range(count)]
        ports = [server.getsockname()[1] for server in servers]
        for server in servers:
            server.close()
        workers = {"cluster.workers": ",".join(f"localhost:{port}" for port in ports)}
        return [start(job, index, pods, tmp_path, **workers) for index in range(count)]

    first = start_all()
    wait_for(lambda: begun(tmp_path / "run") or any(pod.poll() is not None for pod in first), 120)
    began = time.monotonic()
    first[-1].send_signal(signal.SIGTERM)  # one of them is enough
    assert [pod.wait(timeout=120) for pod in first] == [75] * count, first[0].log()
    grace = job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert time.monotonic() - began < grace
    run = Run(tmp_path / "run")
    assert run.state == "stopped" and 0 < run.step < STEPS

    again = start_all()
    assert [pod.wait(timeout=240) for pod in again] == [0] * count, again[0].log()
    assert "continues from" in again[0].log()
    run = Run(tmp_path / "run")
    assert run.state == "done" and list(run.steps) == list(range(1, STEPS + 1))
    assert [pod.log() == "" for pod in again[1:]] == [True] * (count - 1)

"""The processes of a run by flags, TF_CONFIG and SLURM, in this order, and the descriptions that are refused."""

import json

import pytest

from bert_cli.config.settings import Cluster
from bert_cli.errors import ConfigError
from bert_cli.parallel.cluster import Processes, _counts, _expanded, find_processes

UNSET = Cluster()


def tf_config(cluster: dict, kind: str = "worker", index: object = 0) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def slurm(rank: int, nodes: str = "n1,n2", per_node: str = "2,1", **more: str) -> dict[str, str]:
    """Variables of task `rank` of three in a step of job 77 on hosts n1 (two tasks) and n2 (one)."""
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": "3",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": per_node,
        **more,
    }


def hosts(found: Processes) -> list[str]:
    return [worker.rpartition(":")[0] for worker in found.workers]


def test_flags_come_before_tf_config_and_tf_config_before_slurm():
    environment = {**tf_config({"worker": ["a:1", "b:1"]}, index=1), **slurm(2)}
    by_flags = find_processes(Cluster(workers=["x:5", "y:5", "y:6"], rank=1), environment)
    assert (by_flags.workers, by_flags.source) == (("x:5", "y:5", "y:6"), "--cluster.workers")
    by_tf_config = find_processes(UNSET, environment)
    assert (by_tf_config.workers, by_tf_config.rank) == (("a:1", "b:1"), 1)
    del environment["TF_CONFIG"]
    assert find_processes(UNSET, environment).source == "SLURM"


def test_an_empty_environment_and_a_list_of_one_are_a_single_process():
    single = find_processes(UNSET, {})
    assert (single.count, single.rank, single.workers) == (1, 0, ())
    assert (single.local_processes, single.local_rank) == (1, 0)
    assert single.source == "this process alone"
    for text in ("", " ", "{}", '{"cluster": {}}', '{"environment": "cloud"}'):
        assert find_processes(UNSET, {"TF_CONFIG": text}) == single
    assert find_processes(UNSET, tf_config({"worker": ["a:1"]})) == single
    assert find_processes(Cluster(workers=["a:1"], rank=0), {}) == single


def test_local_ranks_count_the_processes_of_a_host():
    workers = ["a:1", "b:1", "a:2", "b:2", "b:3", "[::1]:3"]
    found = [find_processes(Cluster(workers=workers, rank=rank), {}) for rank in range(6)]
    assert [one.local_rank for one in found] == [0, 0, 1, 1, 2, 0]
    assert [one.local_processes for one in found] == [2, 3, 2, 3, 3, 1]


def test_the_chief_is_rank_0_and_workers_follow():
    cluster = {"worker": ["b:1", "c:1"], "chief": ["a:1"]}
    assert find_processes(UNSET, tf_config(cluster, "chief")).rank == 0
    found = find_processes(UNSET, tf_config(cluster, "worker", "1"))
    assert (found.rank, found.workers) == (2, ("a:1", "b:1", "c:1"))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"TF_CONFIG": "{broken"}, "cannot be read"),
        ({"TF_CONFIG": "[1]"}, "cannot be read"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}}'}, "cannot be read"),
        (tf_config({"worker": "a:1"}), "is no list"),
        (tf_config({"worker": ["a:1", "b:1"]}, index="x"), "cannot be read"),
        (tf_config({"worker": ["a:1", "b:1"]}, index=2), "has 2 of that kind"),
        (tf_config({"worker": ["a:1", "b:1"]}, index=-1), "has 2 of that kind"),
        (tf_config({"worker": ["a:1", "b:1"]}, "chief"), "all processes of a run are workers"),
        (tf_config({"worker": ["a:1"], "ps": ["b:1"]}), "all processes of a run are workers"),
        (tf_config({"worker": ["a:1"], "evaluator": ["b:1"]}, "evaluator"), "leave out the others"),
        (tf_config({"chief": ["a:1", "b:1"]}, "chief"), "2 chiefs"),
        (tf_config({"worker": ["a:1", "a:1"]}), "named twice"),
        (tf_config({"worker": ["a:1", "b"]}), "is no host:port"),
        (tf_config({"worker": ["a:1", "b:0"]}), "is no host:port"),
        (tf_config({"worker": ["a:1", "b:70000"]}), "is no host:port"),
        (tf_config({"worker": ["a:1", "grpc://b:1"]}), "is no host:port"),
        (slurm(1, SLURM_DISTRIBUTION="plane"), "--distribution=block"),
        (slurm(1, SLURM_NODEID="1", SLURM_LOCALID="0"), "is number 0 on host 1, but 1 on 0 was expected"),
        (slurm(1, SLURM_PROCID="3"), "is not one of 3"),
        (slurm(1, SLURM_PROCID="x"), "does not describe the tasks"),
        (slurm(1, SLURM_STEP_NUM_TASKS="x"), "does not describe the tasks"),
        (slurm(1, SLURM_STEP_TASKS_PER_NODE="2;1"), "does not describe the tasks"),
        (slurm(1, SLURM_STEP_TASKS_PER_NODE="2(x2)"), "run 4 of the step's 3 tasks"),
        (slurm(1, SLURM_STEP_TASKS_PER_NODE="3"), "names 2 hosts"),
        ({"SLURM_STEP_NODELIST": "n1,n2", "SLURM_NTASKS": "3"}, "lacks SLURM_PROCID"),
    ],
)  # fmt: skip
def test_a_wrong_description_is_an_error(environment, message):
    with pytest.raises(
        ConfigError, match="TF_CONFIG" if "TF_CONFIG" in environment else "SLURM"
    ) as error:
        find_processes(UNSET, environment)
    assert message in str(error.value)


def test_workers_by_flags_are_checked_too():
    with pytest.raises(ConfigError, match=r"--cluster.workers \(b\): is no host:port"):
        find_processes(Cluster(workers=["a:1", "b"], rank=0), {})


def test_the_tasks_of_a_step_agree_on_ranks_hosts_and_ports():
    found = [find_processes(UNSET, slurm(rank)) for rank in range(3)]
    assert len({one.workers for one in found}) == 1
    assert hosts(found[0]) == ["n1", "n1", "n2"]
    assert len(set(found[0].workers)) == 3
    assert [one.rank for one in found] == [0, 1, 2]
    assert [one.local_rank for one in found] == [0, 1, 0]
    assert [one.local_processes for one in found] == [2, 2, 1]
    # Linux gives ports from 32,768 on to sockets without one.
    assert all(20_000 <= int(worker.rpartition(":")[2]) < 32_768 for worker in found[0].workers)


def test_two_jobs_and_two_steps_on_a_host_have_different_ports():
    numbers = [(job, step) for job in ("77", "78") for step in ("0", "1")]
    found = [
        find_processes(UNSET, slurm(0, SLURM_JOB_ID=job, SLURM_STEP_ID=step)).workers
        for job, step in numbers
    ]
    assert len({worker for workers in found for worker in workers}) == 12


def test_without_the_numbers_of_the_step_those_of_the_job_are_used():
    environment = slurm(2, SLURM_TASKS_PER_NODE="2,1")
    del environment["SLURM_STEP_NUM_TASKS"], environment["SLURM_STEP_TASKS_PER_NODE"]
    assert hosts(find_processes(UNSET, environment)) == ["n1", "n1", "n2"]


def test_a_batch_script_a_shell_and_a_step_of_one_task_are_single_processes():
    script = {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "0",
        "SLURM_JOB_NODELIST": "n[1-4]",
        "SLURM_TASKS_PER_NODE": "1(x4)",
    }
    step = {**script, "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_NUM_TASKS": "1"}
    for environment in (script, step):
        assert find_processes(UNSET, environment).count == 1


def test_distributions_other_than_block():
    cyclic = slurm(1, SLURM_DISTRIBUTION="cyclic:block", SLURM_NODEID="1", SLURM_LOCALID="0")
    assert hosts(find_processes(UNSET, cyclic)) == ["n1", "n2", "n1"]
    # Any is the same with one task a host.
    arbitrary = slurm(2, "n1,n2,n3", "1(x3)", SLURM_DISTRIBUTION="arbitrary")
    assert hosts(find_processes(UNSET, arbitrary)) == ["n1", "n2", "n3"]


def test_scontrol_expands_host_lists_and_numbered_ones_are_expanded_without_it(tmp_path):
    program = tmp_path / "scontrol"
    program.write_text(
        '#!/bin/sh\n[ "$*" = "show hostnames r[1-2]n1" ] && echo r1n1 && echo r2n1\n'
    )
    program.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    assert hosts(find_processes(UNSET, slurm(0, "r[1-2]n1", PATH=path))) == ["r1n1", "r1n1", "r2n1"]
    with pytest.raises(ConfigError, match="scontrol show hostnames"):
        find_processes(UNSET, slurm(0, "n[1-2]", PATH=path))
    program.unlink()
    found = find_processes(UNSET, slurm(0, "n[08-09]", PATH=str(tmp_path)))
    assert hosts(found) == ["n08", "n08", "n09"]
    with pytest.raises(ConfigError, match="needs `scontrol`"):
        find_processes(UNSET, slurm(0, "r[1-2]n[1-2]", PATH=str(tmp_path)))


def test_host_lists_are_expanded_as_tensorflow_does():
    from tensorflow.python.distribute.cluster_resolver import slurm_cluster_resolver as theirs

    for nodes in ("n1", "n[1-2],m5,o[3-4,6,7-9]", "a,b-x[008-011]", "gpu[1,3],gpu[5-6]"):
        assert _expanded(nodes) == theirs.expand_hostlist(nodes)
    for counts in ("1", "3(x2),2,1", "2(x10)"):
        assert _counts(counts) == theirs.expand_tasks_per_node(counts)

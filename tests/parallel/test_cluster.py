"""Who takes part: flags before TF_CONFIG before SLURM before a process alone, and what is refused."""

import json

import pytest

from bert_cli.config.parallel import Cluster
from bert_cli.errors import ConfigError
from bert_cli.parallel.cluster import Processes, _counts, _expanded, find_processes

NOBODY = Cluster()


def tf_config(cluster: dict, kind: str = "worker", index: object = 0) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def slurm(rank: int, nodes: str = "n1,n2", per_node: str = "2,1", **more: str) -> dict[str, str]:
    """What task `rank` of three finds in a step of job 77 on hosts n1 (two tasks) and n2 (one)."""
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


def test_a_process_nobody_speaks_of_is_alone():
    found = find_processes(NOBODY, {})
    assert (found.count, found.rank, found.workers) == (1, 0, ())
    assert (found.local_processes, found.local_rank) == (1, 0)
    assert found.source == "this process alone"


def test_flags_come_before_tf_config_and_tf_config_before_slurm():
    environment = {**tf_config({"worker": ["a:1", "b:1"]}, index=1), **slurm(2)}
    flags = Cluster(workers=["x:5", "y:5", "y:6"], rank=1)
    assert find_processes(flags, environment).workers == ("x:5", "y:5", "y:6")
    assert find_processes(flags, environment).source == "--cluster.workers"
    assert find_processes(NOBODY, environment).workers == ("a:1", "b:1")
    assert find_processes(NOBODY, environment).rank == 1
    del environment["TF_CONFIG"]
    assert find_processes(NOBODY, environment).source == "SLURM"


def test_places_on_a_host_are_counted_among_its_own_workers():
    workers = ["a:1", "b:1", "a:2", "b:2", "b:3", "[::1]:3"]
    places = [find_processes(Cluster(workers=workers, rank=rank), {}) for rank in range(6)]
    assert [place.local_rank for place in places] == [0, 0, 1, 1, 2, 0]
    assert [place.local_processes for place in places] == [2, 3, 2, 3, 3, 1]


def test_the_chief_is_rank_0_and_workers_follow():
    cluster = {"worker": ["b:1", "c:1"], "chief": ["a:1"]}
    assert find_processes(NOBODY, tf_config(cluster, "chief")).rank == 0
    found = find_processes(NOBODY, tf_config(cluster, "worker", "1"))
    assert (found.rank, found.workers) == (2, ("a:1", "b:1", "c:1"))


@pytest.mark.parametrize("text", ["", " ", "{}", '{"cluster": {}}', '{"environment": "cloud"}'])
def test_a_tf_config_without_a_cluster_says_nothing(text):
    assert find_processes(NOBODY, {"TF_CONFIG": text}).count == 1


def test_a_list_of_one_is_alone():
    assert find_processes(NOBODY, tf_config({"worker": ["a:1"]})) == Processes(())
    assert find_processes(Cluster(workers=["a:1"], rank=0), {}) == Processes(())


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"TF_CONFIG": "{broken"}, "cannot be read"),
        ({"TF_CONFIG": "[1]"}, "cannot be read"),
        ({"TF_CONFIG": "3"}, "cannot be read"),
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
        (tf_config({"worker": ["a:1", "b:"]}), "is no host:port"),
        (tf_config({"worker": ["a:1", "b:0"]}), "is no host:port"),
        (tf_config({"worker": ["a:1", "b:70000"]}), "is no host:port"),
        (tf_config({"worker": ["a:1", "grpc://b:1"]}), "is no host:port"),
    ],
)
def test_a_tf_config_that_cannot_be_is_refused(environment, told):
    with pytest.raises(ConfigError, match="TF_CONFIG") as refused:
        find_processes(NOBODY, environment)
    assert told in str(refused.value)


def test_workers_by_flags_are_checked_too():
    with pytest.raises(ConfigError, match=r"--cluster.workers \(b\): is no host:port"):
        find_processes(Cluster(workers=["a:1", "b"], rank=0), {})


def test_the_tasks_of_a_step_agree_on_ranks_hosts_and_ports():
    found = [find_processes(NOBODY, slurm(rank)) for rank in range(3)]
    assert len({place.workers for place in found}) == 1
    assert hosts(found[0]) == ["n1", "n1", "n2"]
    assert len(set(found[0].workers)) == 3
    assert [place.rank for place in found] == [0, 1, 2]
    assert [place.local_rank for place in found] == [0, 1, 0]
    assert [place.local_processes for place in found] == [2, 2, 1]
    # Linux gives ports from 32,768 on to whoever does not ask for one.
    assert all(20_000 <= int(worker.rpartition(":")[2]) < 32_768 for worker in found[0].workers)


def test_two_jobs_and_two_steps_on_a_host_have_other_ports():
    runs = [
        {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
        for job in (77, 78)
        for step in (0, 1)
    ]
    workers = [find_processes(NOBODY, slurm(0, **run)).workers for run in runs]
    assert len({worker for of_one in workers for worker in of_one}) == 12


def test_without_numbers_of_the_step_those_of_the_job_are_taken():
    environment = slurm(2, SLURM_TASKS_PER_NODE="2,1")
    del environment["SLURM_STEP_NUM_TASKS"], environment["SLURM_STEP_TASKS_PER_NODE"]
    assert hosts(find_processes(NOBODY, environment)) == ["n1", "n1", "n2"]


def test_a_jobs_script_the_shell_of_an_allocation_and_a_step_of_one_task_are_alone():
    inside = {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "0",
        "SLURM_JOB_NODELIST": "n[1-4]",
        "SLURM_TASKS_PER_NODE": "1(x4)",
    }
    shell = {**inside, "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_NUM_TASKS": "1"}
    for environment in (inside, shell):
        assert find_processes(NOBODY, environment).count == 1


def test_a_cyclic_distribution_counts_ranks_over_the_hosts_first():
    environment = slurm(1, SLURM_DISTRIBUTION="cyclic:block", SLURM_NODEID="1", SLURM_LOCALID="0")
    assert hosts(find_processes(NOBODY, environment)) == ["n1", "n2", "n1"]


def test_any_distribution_is_the_same_with_one_task_a_host():
    environment = slurm(2, "n1,n2,n3", "1(x3)", SLURM_DISTRIBUTION="arbitrary")
    assert hosts(find_processes(NOBODY, environment)) == ["n1", "n2", "n3"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"SLURM_DISTRIBUTION": "plane"}, "--distribution=block"),
        ({"SLURM_NODEID": "1", "SLURM_LOCALID": "0"}, "is number 0 on host 1, and would be 1 on 0"),
        ({"SLURM_PROCID": "3"}, "is not one of 3"),
        ({"SLURM_PROCID": "x"}, "does not say who takes part"),
        ({"SLURM_STEP_NUM_TASKS": "x"}, "does not say who takes part"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2;1"}, "does not say who takes part"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, "run 4 of the step's 3 tasks"),
        ({"SLURM_STEP_TASKS_PER_NODE": "3"}, "names 2 hosts"),
    ],
)
def test_what_slurm_cannot_mean_is_refused(changes, told):
    with pytest.raises(ConfigError, match="SLURM") as refused:
        find_processes(NOBODY, slurm(1, **changes))
    assert told in str(refused.value)


def test_a_step_that_lacks_a_variable_is_refused_by_its_name():
    environment = slurm(1)
    del environment["SLURM_PROCID"]
    with pytest.raises(ConfigError, match="lacks SLURM_PROCID"):
        find_processes(NOBODY, environment)


def scontrol(folder, script: str) -> str:
    """A PATH with an `scontrol` that runs a script."""
    (folder / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "scontrol").chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def test_scontrol_tells_the_hosts_of_a_list_in_short_form(tmp_path):
    path = scontrol(tmp_path, '[ "$*" = "show hostnames r[1-2]n1" ] && echo r1n1 && echo r2n1')
    found = find_processes(NOBODY, slurm(0, "r[1-2]n1", PATH=path))
    assert hosts(found) == ["r1n1", "r1n1", "r2n1"]


def test_an_scontrol_that_fails_is_named(tmp_path):
    path = scontrol(tmp_path, "exit 1")
    with pytest.raises(ConfigError, match="scontrol show hostnames"):
        find_processes(NOBODY, slurm(0, "n[1-2]", PATH=path))


def test_without_scontrol_numbered_hosts_are_read_here(tmp_path):
    found = find_processes(NOBODY, slurm(0, "n[08-09]", PATH=str(tmp_path)))
    assert hosts(found) == ["n08", "n08", "n09"]
    with pytest.raises(ConfigError, match="no `scontrol` here"):
        find_processes(NOBODY, slurm(0, "r[1-2]n[1-2]", PATH=str(tmp_path)))


def test_short_forms_are_read_as_tensorflow_reads_them():
    from tensorflow.python.distribute.cluster_resolver import slurm_cluster_resolver as theirs

    for nodes in ("n1", "n[1-2],m5,o[3-4,6,7-9]", "a,b-x[008-011]", "gpu[1,3],gpu[5-6]"):
        assert _expanded(nodes) == theirs.expand_hostlist(nodes)
    for counts in ("1", "3(x2),2,1", "2(x10)"):
        assert _counts(counts) == theirs.expand_tasks_per_node(counts)

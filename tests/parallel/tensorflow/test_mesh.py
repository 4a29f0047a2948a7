"""Devices as replicas x stages, and what is refused."""

import os

import pytest
import tensorflow as tf
from support.layouts import settings_of

from bert_cli.errors import ConfigError, DeviceError
from bert_cli.parallel.cluster import Processes
from bert_cli.parallel.tensorflow import runtime
from bert_cli.parallel.tensorflow.collectives import (
    KEYS_OF_MESH,
    TensorFlowProcessGroup,
    device_group,
    lost_process,
)
from bert_cli.tasks.run import build

WORKERS = ("a:1", "a:2", "b:1")


def test_every_replica_has_devices_of_its_own():
    found = build.open_mesh(settings_of("2x2"), Processes(()))
    assert found.replicas == 2 and found.first_replica == 0 and found.kind == "CPU"
    flat = [device for row in found.devices for device in row]
    assert len(found.devices) == 2 and len(set(flat)) == 4
    assert found.host == flat[0]


def test_replicas_that_cannot_be_divided_among_processes_are_refused():
    with pytest.raises(
        ConfigError, match="cannot be divided among 3 processes; give --global-batch"
    ):
        build.open_mesh(settings_of("2x1"), Processes(WORKERS))


def test_a_process_that_started_tensorflow_with_too_few_devices_is_told_so():
    """The tests cut the CPU into eight; nobody can cut it again."""
    assert len(tf.config.list_logical_devices("CPU")) == 8
    settings = settings_of("1x4", 16)
    batch = settings.global_batch.model_copy(
        update={"replicas": 4, "grad_acc_steps_per_replica": 4}
    )
    with pytest.raises(DeviceError, match="TensorFlow was started before"):
        build.open_mesh(settings.model_copy(update={"global_batch": batch}), Processes(()))


def test_too_few_gpus_are_refused_with_the_way_out(monkeypatch):
    monkeypatch.setattr(runtime, "gpus_of", lambda processes: ["one GPU"])
    with pytest.raises(
        DeviceError, match=r"needs 4 GPUs, here are 1; give --parallel\.layout auto"
    ):
        build.open_mesh(settings_of("2x2"), Processes(()))


def test_a_hosts_gpus_are_divided_among_its_processes(monkeypatch):
    gpus = [f"GPU {number}" for number in range(4)]
    monkeypatch.setattr(runtime.tf.config, "list_physical_devices", lambda kind: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert runtime.gpus_of(Processes(())) == gpus
    assert runtime.gpus_of(Processes(WORKERS, 1)) == gpus[2:]
    assert runtime.gpus_of(Processes(WORKERS, 2)) == gpus
    # A scheduler has divided them already.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert runtime.gpus_of(Processes(WORKERS, 1)) == gpus
    # But SLURM's --gres shows a node's GPUs to all its tasks.
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    assert runtime.gpus_of(Processes(WORKERS, 1)) == gpus[2:]
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    assert runtime.gpus_of(Processes(WORKERS, 1)) == gpus
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    three = ("a:1", "a:2", "a:3")
    with pytest.raises(DeviceError, match="4 GPUs cannot be divided"):
        runtime.gpus_of(Processes(three, 0))


def test_no_two_collectives_of_a_process_share_a_key():
    one = build.open_mesh(settings_of("2x2"), Processes(()))
    other = build.open_mesh(settings_of("2x2"), Processes(()))
    keys = [device_group(m, 0, device).key for m in (one, other) for device in (0, 1)]
    assert len(set(keys)) == 4
    assert device_group(one, 0, 1).key == device_group(one, 1, 1).key
    assert all(key > KEYS_OF_MESH for key in keys)


def test_a_process_alone_is_its_own_total():
    group = TensorFlowProcessGroup(build.open_mesh(settings_of("1x1"), Processes(())))
    assert group.all_reduce([1.5, 2.0]).tolist() == [1.5, 2.0]
    assert group.all_gather(7.0) == [7.0]
    assert group.broadcast([float("inf")]) == [float("inf")]


@pytest.mark.parametrize(
    ("message", "who"),
    [
        ("aborted by: Error reported from /job:worker/task:2: The following tasks are", "rank 2"),
        ("reset by peer from target /job:worker/replica:0/task:1 while calling task:2", "rank 1"),
        ("Socket closed", "another process"),
    ],
)
def test_the_error_of_a_lost_process_names_its_rank(message, who):
    assert f"cluster: {who} is gone" in str(lost_process(message, rank=0))


@pytest.mark.parametrize(
    ("own", "wanted"),
    [
        ("", "--xla_backend_extra_options=xla_cpu_use_multi_output_fusion"),
        ("--a=b ", "--a=b --xla_backend_extra_options=xla_cpu_use_multi_output_fusion"),
        ("flags.txt", "flags.txt"),
    ],
)
def test_an_option_of_xlas_is_added_once_to_ones_own(monkeypatch, own, wanted):
    monkeypatch.setenv("XLA_FLAGS", own)
    runtime.fuse_results()
    runtime.fuse_results()
    assert os.environ["XLA_FLAGS"] == wanted
    assert runtime.are_results_fused() == wanted.startswith("--")

"""The devices of a mesh, what is rejected, and collectives of a single process."""

import os
import threading

import pytest
import tensorflow as tf
from support.layouts import settings_of

from bert_cli.errors import ConfigError, DeviceError
from bert_cli.parallel.cluster import Processes
from bert_cli.parallel.engine import Mesh
from bert_cli.parallel.tensorflow import mesh as runtime
from bert_cli.parallel.tensorflow.mesh import (
    KEYS_OF_MESH,
    TensorFlowProcessGroup,
    device_group,
    lost_process,
)
from bert_cli.tasks.run import build

WORKERS = ("a:1", "a:2", "b:1")


def mesh_of(layout: str) -> Mesh:
    return build.open_mesh(settings_of(layout), Processes(()))


def test_every_replica_has_devices_of_its_own_and_every_collective_a_key():
    mesh, other = mesh_of("2x2"), mesh_of("2x2")
    assert mesh.replicas == 2 and mesh.first_replica == 0 and mesh.kind == "CPU"
    flat = [device for row in mesh.devices for device in row]
    assert len(mesh.devices) == 2 and len(set(flat)) == 4
    assert mesh.host == flat[0]
    keys = [device_group(m, 0, device).key for m in (mesh, other) for device in (0, 1)]
    assert len(set(keys)) == 4 and all(key > KEYS_OF_MESH for key in keys)
    assert device_group(mesh, 0, 1).key == device_group(mesh, 1, 1).key


def test_a_layout_that_does_not_fit_processes_gpus_or_devices_is_rejected(monkeypatch):
    with pytest.raises(ConfigError, match="cannot be divided among 3 processes; give --global-"):
        build.open_mesh(settings_of("2x1"), Processes(WORKERS))
    # The tests divide the CPU into eight devices, which TensorFlow allows only once.
    assert len(tf.config.list_logical_devices("CPU")) == 8
    settings = settings_of("5 stages on 4 devices", 16)
    batch = settings.global_batch.model_copy(
        update={"replicas": 4, "grad_acc_steps_per_replica": 4}
    )
    with pytest.raises(DeviceError, match="TensorFlow was started before"):
        build.open_mesh(settings.model_copy(update={"global_batch": batch}), Processes(()))
    monkeypatch.setattr(runtime, "gpus_of", lambda processes: ["one GPU"])
    with pytest.raises(
        DeviceError, match=r"needs 4 GPUs, here are 1; give --parallel\.layout auto"
    ):
        mesh_of("2x2")


def test_the_gpus_of_a_host_are_divided_among_its_processes(monkeypatch):
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
    with pytest.raises(DeviceError, match="4 GPUs cannot be divided"):
        runtime.gpus_of(Processes(("a:1", "a:2", "a:3"), 0))


class TwoProcesses(TensorFlowProcessGroup):
    """Rank 1 of two, whose other process adds the same numbers."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.rank, self.world_size = 1, 2
        self.seen: list[tuple[int, bool]] = []

    def _sum(self, numbers):
        self.seen.append((self.collectives, self.is_waiting.is_set()))
        return 2 * numbers


def test_a_collective_is_counted_and_flagged_while_it_runs_and_names_a_lost_process():
    alone = TensorFlowProcessGroup(mesh_of("1x1"))
    assert alone.all_reduce([1.5, 2.0]).tolist() == [1.5, 2.0]
    assert (alone.broadcast([float("inf")]), alone.collectives) == ([float("inf")], 0)
    group = TwoProcesses(mesh_of("1x1"))
    assert group.all_reduce([[1.0], [2.0]]).tolist() == [[2.0], [4.0]]
    assert group.all_gather(3.0) == [0.0, 6.0]
    assert group.broadcast([5.0]) == [0.0]
    assert group.seen == [(1, True), (2, True), (3, True)]
    assert isinstance(group.is_waiting, threading.Event) and not group.is_waiting.is_set()
    error = tf.errors.UnavailableError(None, None, "from /job:worker/replica:0/task:0: closed")
    with pytest.raises(DeviceError, match="rank 0 is gone"), group.collective():
        raise error
    assert not group.is_waiting.is_set()


def test_the_error_of_a_lost_process_names_the_first_rank_in_the_message():
    for message, which in (
        ("aborted by: Error reported from /job:worker/task:2: The following tasks", "rank 2"),
        ("reset by peer from target /job:worker/replica:0/task:1 while calling task:2", "rank 1"),
        ("from /job:worker/task:0: Socket closed", "another process"),
    ):
        assert f"cluster: {which} is gone" in str(lost_process(message, rank=0))


def test_an_option_of_xla_is_added_once_to_the_flags_of_the_user(monkeypatch):
    option = "--xla_backend_extra_options=xla_cpu_use_multi_output_fusion"
    for own, flags in (("", option), ("--a=b ", f"--a=b {option}"), ("flags.txt", "flags.txt")):
        monkeypatch.setenv("XLA_FLAGS", own)
        runtime.fuse_results()
        runtime.fuse_results()
        assert os.environ["XLA_FLAGS"] == flags
        assert runtime.are_results_fused() == flags.startswith("--")

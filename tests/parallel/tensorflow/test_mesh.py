"""The devices of a mesh, and what is rejected."""

import os
from types import SimpleNamespace

import pytest
import tensorflow as tf
from support.layouts import settings_of
from tensorflow.python.platform import tf_logging

from bert_cli.errors import DeviceError
from bert_cli.parallel.cluster import Processes
from bert_cli.parallel.group import lost_process
from bert_cli.parallel.tensorflow import mesh as runtime
from bert_cli.parallel.tensorflow.mesh import TensorFlowProcessGroup, rank_in
from bert_cli.tasks.run.resolve import open_mesh

WORKERS = ("a:1", "a:2", "b:1")


def test_a_layout_that_does_not_fit_gpus_or_devices_is_rejected(monkeypatch):
    # The tests divide the CPU into eight devices, which TensorFlow allows only once.
    assert len(tf.config.list_logical_devices("CPU")) == 8
    work = settings_of("5 stages on 4 devices", 16)
    with pytest.raises(DeviceError, match="TensorFlow was started before"):
        open_mesh(work.with_batch(replicas=4))
    monkeypatch.setattr(runtime, "gpus_of", lambda processes: ["one GPU"])
    with pytest.raises(DeviceError, match=r"needs 4 GPUs, but finds 1; .*layout auto"):
        open_mesh(settings_of("2x2"))


def test_the_gpus_of_a_host_are_divided_among_its_processes(monkeypatch):
    gpus = [f"GPU {number}" for number in range(4)]
    monkeypatch.setattr(runtime.tf.config, "list_physical_devices", lambda kind: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert runtime.gpus_of(Processes(())) == gpus
    assert runtime.gpus_of(Processes(WORKERS, 1)) == gpus[2:]
    assert runtime.gpus_of(Processes(WORKERS, 2)) == gpus
    assert runtime.gpus_of(Processes(("a:1", "b:1", "b:2"), 1)) == gpus[:2]
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
    with pytest.raises(DeviceError, match=r"GPUs \(4 on .*divided evenly among 3"):
        runtime.gpus_of(Processes(("a:1", "a:2", "a:3"), 0))


def test_the_memory_of_a_process_is_that_of_its_fullest_gpu(monkeypatch):
    used = {"GPU:0": (5, 9), "GPU:3": (7, 8)}
    get = lambda name: dict(zip(("current", "peak"), used[name], strict=True))  # noqa: E731
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", get)
    start = "/job:worker/replica:0/task:2/device"
    mesh = SimpleNamespace(devices=((f"{start}:GPU:0",), (f"{start}:GPU:3",)))
    assert runtime.used_memory(mesh) == (7, 9)


@pytest.mark.parametrize(
    ("precision", "gpus", "is_off"),
    [("float32", [], False), ("float16", ["g"], True), ("mixed_bfloat16", [], True), ("mixed_float16", ["g"], False)],
)  # fmt: skip
def test_the_graph_optimizer_fuses_no_product_of_16_bits_on_a_cpu(
    precision, gpus, is_off, monkeypatch
):
    calls = []
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
    monkeypatch.setattr(tf.config.optimizer, "set_experimental_options", calls.append)
    monkeypatch.setattr(tf.config.experimental, "enable_op_determinism", lambda: calls.append(1))
    for deterministic in (False, True):
        runtime.configure_runtime(precision, deterministic)
    assert calls == [*[{"remapping": False}] * is_off, 1, *[{"remapping": False}] * is_off]


def test_a_process_alone_enters_no_collective():
    alone = TensorFlowProcessGroup(open_mesh(settings_of("1x1")))
    assert alone.all_reduce([1.5, 2.0]).tolist() == [1.5, 2.0]
    assert (alone.broadcast([float("inf")]), alone.collectives) == ([float("inf")], 0)


def test_tensorflow_does_not_warn_of_the_functions_of_many_engines(monkeypatch):
    warned: list[object] = []
    monkeypatch.setattr(tf_logging, "warning", lambda *words: warned.append(words))

    class Stage:
        def forward(self, number):
            return number + 1

    for _ in range(6):
        assert runtime.traced(Stage().forward)(tf.constant(1)) == 2
    assert not warned


def test_a_process_that_stops_while_it_publishes_leaves_the_text_before(monkeypatch):
    stored = {}

    class Service:
        def delete_config_key_value(self, key):
            stored.pop(key, None)

        def set_config_key_value(self, key, text):
            if "step 4" in text:
                raise InterruptedError
            stored[key] = text

        def get_config_key_value(self, key, timeout):
            if key not in stored:
                raise tf.errors.NotFoundError(None, None, key)
            return stored[key]

    group = TensorFlowProcessGroup(open_mesh(settings_of("1x1")))
    monkeypatch.setattr(runtime.context, "context", Service)
    assert group.published_by(0) == ""
    for step in range(1, 4):
        group.publish(f"step {step}")
        assert group.published_by(0) == f"step {step}"
    with pytest.raises(InterruptedError):
        group.publish("step 4")
    assert group.published_by(0) == "step 3"


def test_the_error_of_a_lost_process_names_the_first_rank_in_the_message():
    for message, which in (
        ("aborted by: Error reported from /job:worker/task:2: The following tasks", "rank 2 (b:1)"),
        ("reset by peer from target /job:worker/task:1 while calling task:2", "rank 1 (a:2)"),
        ("from /job:worker/task:0: Socket closed", "another process"),
    ):
        error = lost_process(rank_in(message, rank=0), WORKERS)
        assert f"cluster: {which} is gone" in str(error)


def test_an_option_of_xla_is_added_once_to_the_flags_of_the_user(monkeypatch):
    option = "--xla_backend_extra_options=xla_cpu_use_multi_output_fusion"
    for own, flags in (("", option), ("--a=b ", f"--a=b {option}"), ("flags.txt", "flags.txt")):
        monkeypatch.setenv("XLA_FLAGS", own)
        runtime.fuse_results()
        runtime.fuse_results()
        assert os.environ["XLA_FLAGS"] == flags
        assert runtime.are_results_fused() == flags.startswith("--")

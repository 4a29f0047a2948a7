"""The GPUs that a process of a host gets, and the devices of each replica."""

import pytest

from bert_cli.errors import DeviceError
from bert_cli.parallel.cluster import Processes
from bert_cli.parallel.devices import device_memory, gpus_of
from bert_cli.parallel.runtime import Layout, Mesh, divide_devices


def test_gpus_are_divided_evenly(tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: H200\n  MIG 1g.18gb Device 0:\nGPU 1: H200'\n")
    smi.chmod(0o755)
    environment = {"PATH": str(tmp_path)}
    assert [gpus_of(rank, 2, environment) for rank in (0, 1)] == [["0"], ["1"]]
    environment["CUDA_VISIBLE_DEVICES"] = "3,GPU-abc, 5,6"
    assert gpus_of(1, 2, environment) == ["5", "6"]
    # A single process uses all, as without a launcher.
    assert gpus_of(0, 1, environment) == []
    with pytest.raises(DeviceError, match=r"GPUs \(4 on .*divided evenly among 3 processes"):
        gpus_of(0, 3, environment)
    for hidden in ("", "-1", "-1,0"):
        assert gpus_of(0, 2, {"CUDA_VISIBLE_DEVICES": hidden}) == []
    smi.write_text(f"{smi.read_text()}exit 9\n")
    assert gpus_of(0, 2, {"PATH": str(tmp_path)}) == []


def test_the_memory_of_a_device_is_that_of_the_smallest_visible_gpu(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 81920\nif [ $# = 2 ]; then echo 40960; else echo 61440; fi\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_memory("GPU", Processes(())) == 40960 * 2**20
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")  # `-i` and their numbers
    assert device_memory("GPU", Processes(())) == 61440 * 2**20
    smi.write_text("#!/bin/sh\necho 81920\nexit 9\n")
    problem = "nvidia-smi: does not report the memory of the GPUs .*set pipeline_stages instead"
    with pytest.raises(DeviceError, match=problem):
        device_memory("GPU", Processes(()))


def test_each_replica_has_devices_of_its_own():
    names = [f"CPU:{number}" for number in range(9)]
    layout = Layout(replicas=4, stage_devices=(0, 1, 0))
    processes = Processes(("a:1", "b:1"), 1)
    expected = ("CPU:0", "CPU:1"), ("CPU:2", "CPU:3")
    assert divide_devices(names, "CPU", processes, layout) == expected
    mesh = Mesh(layout, expected, "", processes)
    assert (mesh.replicas, mesh.first_replica) == (4, 2)
    for name, kind in (("jax:cuda:gpu:0", "GPU"), ("/job:x/replica:0/task:0/device:CPU:3", "CPU")):
        assert Mesh(layout, ((name,),), "", processes).kind == kind
    layout = Layout(replicas=4, tensor_shape=(2, 2))
    with pytest.raises(DeviceError, match=r"2 replicas x 4 devices.* needs 8 CPUs, but finds 7"):
        divide_devices(names[:7], "CPU", processes, layout)

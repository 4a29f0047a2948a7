"""The functions and values that every engine's modules have."""

import pytest

from bert_cli.errors import DeviceError
from bert_cli.parallel.cluster import Processes
from bert_cli.parallel.runtime import Layout, divide_devices


def test_each_replica_has_devices_of_its_own():
    names = [f"CPU:{number}" for number in range(9)]
    layout = Layout(replicas=4, stage_devices=(0, 1, 0))
    processes = Processes(("a:1", "b:1"), 1)
    expected = ("CPU:0", "CPU:1"), ("CPU:2", "CPU:3")
    assert divide_devices(names, "CPU", processes, layout) == expected
    layout = Layout(replicas=4, tensor_shape=(2, 2))
    with pytest.raises(DeviceError, match=r"2 replicas x 4 devices.* needs 8 CPUs, but finds 7"):
        divide_devices(names[:7], "CPU", processes, layout)

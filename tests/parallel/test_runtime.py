"""The functions and values that every engine's modules have."""

import inspect
from importlib import import_module

import pytest

from bert_cli.errors import DeviceError
from bert_cli.parallel.cluster import Processes
from bert_cli.parallel.runtime import Layout, Runtime, divide_devices


@pytest.mark.parametrize("engine", ["tensorflow", "jax"])
def test_the_module_of_an_engine_has_the_functions_of_the_runtime(engine):
    """mypy does not compare them: the module is imported by name."""
    module = import_module(f"bert_cli.parallel.{engine}.mesh")
    for name, function in inspect.getmembers(Runtime, inspect.isfunction):
        if not name.startswith("_"):
            assert kinds(getattr(module, name)) == kinds(function)[1:], name


def kinds(function) -> list[tuple[str, object]]:
    parameters = inspect.signature(function).parameters.values()
    return [(parameter.name, parameter.kind) for parameter in parameters]


def test_each_replica_has_devices_of_its_own():
    names = [f"CPU:{number}" for number in range(9)]
    layout = Layout(replicas=4, stage_devices=(0, 1, 0))
    processes = Processes(("a:1", "b:1"), 1)
    expected = ("CPU:0", "CPU:1"), ("CPU:2", "CPU:3")
    assert divide_devices(names, "CPU", processes, layout) == expected
    layout = Layout(replicas=4, tensor_shape=(2, 2))
    with pytest.raises(DeviceError, match=r"2 replicas x 4 devices.* needs 8 CPUs, but finds 7"):
        divide_devices(names[:7], "CPU", processes, layout)

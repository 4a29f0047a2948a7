"""A checkpoint is written in the background, of a copy of the state, and errors are raised."""

import threading

import numpy as np
import pytest
import tensorflow as tf

from bert_cli.optim.schedule import first_loss_scale
from bert_cli.train.loop import BackgroundWriter, State, copy_state


def test_a_copy_does_not_change_with_the_state():
    weight, first, second = (tf.Variable([float(number)] * 3) for number in range(3))
    state = State({"w": weight}, {"w": (first, second)}, first_loss_scale(8.0), 5)
    copied = copy_state(state)
    weight.assign(np.full(3, 7.0, np.float32))
    second.assign(np.full(3, 7.0, np.float32))
    state.step = 6
    assert copied.step == 5 and copied.loss_scale.value == 8.0
    np.testing.assert_array_equal(copied.weights["w"].numpy(), [0.0, 0.0, 0.0])
    np.testing.assert_array_equal(copied.moments["w"][1].numpy(), [2.0, 2.0, 2.0])
    with pytest.raises(TypeError, match="cannot be changed"):
        copied.weights["w"].assign(np.zeros(3, np.float32))


class Disk:
    """Writes block until it is free."""

    def __init__(self) -> None:
        self.free, self.written = threading.Event(), []

    def write(self, name: str) -> None:
        assert self.free.wait(10.0)
        self.written.append(name)


def test_the_run_continues_during_a_write_and_a_second_write_waits_for_the_first():
    disk = Disk()
    with BackgroundWriter() as writer:
        writer.start(lambda: disk.write("first"))
        writer.check()
        assert disk.written == []
        threading.Timer(0.05, disk.free.set).start()
        writer.start(lambda: disk.write("second"))
        assert disk.written[0] == "first"
    assert disk.written == ["first", "second"]


def fail() -> None:
    raise OSError("the disk is full")


def test_an_error_of_a_write_is_raised_once_at_the_next_check_or_at_the_end():
    writer = BackgroundWriter()
    writer.start(fail)
    for act in (writer.wait, lambda: writer.start(fail)):
        with pytest.raises(OSError, match="full"):
            act()
            writer.wait()
    writer.check()
    with pytest.raises(OSError, match="full"), BackgroundWriter() as other:
        other.start(fail)


@pytest.mark.parametrize(("error", "waits"), [(ValueError, True), (KeyboardInterrupt, False)])
def test_an_error_of_the_run_waits_for_the_write_and_a_second_ctrl_c_does_not(error, waits):
    disk = Disk()
    with pytest.raises(error), BackgroundWriter() as writer:
        writer.start(lambda: disk.write("a"))
        if waits:
            threading.Timer(0.05, disk.free.set).start()
        raise error
    assert bool(disk.written) is waits
    disk.free.set()

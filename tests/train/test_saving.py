"""A checkpoint is written beside the training, of the state as it was, and nothing that fails is silent."""

import threading
import time

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from bert_cli.optim.loss_scale import first_loss_scale  # noqa: E402
from bert_cli.train.saving import Writer, copied  # noqa: E402
from bert_cli.train.step import State  # noqa: E402


def state() -> State:
    weight, first, second = (tf.Variable([float(number)] * 3) for number in range(3))
    return State({"w": weight}, {"w": (first, second)}, first_loss_scale(8.0), 5)


def test_a_copy_keeps_the_state_as_it_was() -> None:
    changing = state()
    held = copied(changing)
    changing.weights["w"].assign(np.full(3, 7.0, np.float32))
    changing.moments["w"][1].assign(np.full(3, 7.0, np.float32))
    changing.step = 6
    assert held.step == 5 and held.loss_scale.value == 8.0
    np.testing.assert_array_equal(held.weights["w"].numpy(), [0.0, 0.0, 0.0])
    np.testing.assert_array_equal(held.moments["w"][1].numpy(), [2.0, 2.0, 2.0])
    with pytest.raises(TypeError, match="only read"):
        held.weights["w"].assign(np.zeros(3, np.float32))


def test_the_run_goes_on_while_something_is_written() -> None:
    disk_is_free, written = threading.Event(), []

    def write() -> None:
        assert disk_is_free.wait(10.0)
        written.append("a")

    with Writer() as writer:
        writer.start(write)
        writer.look()
        assert written == []
        disk_is_free.set()
    assert written == ["a"]


def test_what_comes_second_is_written_second() -> None:
    order = []

    def write(name: str, seconds: float) -> None:
        time.sleep(seconds)
        order.append(name)

    with Writer() as writer:
        writer.start(lambda: write("first", 0.2))
        writer.start(lambda: write("second", 0.0))
    assert order == ["first", "second"]


def fail() -> None:
    raise OSError("the disk is full")


def test_what_could_not_be_written_is_told_once_at_the_next_look_or_at_the_end() -> None:
    writer = Writer()
    writer.start(fail)
    for act in (writer.wait, lambda: writer.start(fail)):
        with pytest.raises(OSError, match="full"):
            act()
            writer.wait()
    writer.look()
    with pytest.raises(OSError, match="full"), Writer() as other:
        other.start(fail)


@pytest.mark.parametrize(("error", "waits"), [(ValueError, True), (KeyboardInterrupt, False)])
def test_an_error_of_the_run_waits_for_its_checkpoint_and_a_second_ctrl_c_does_not(
    error: type[BaseException], waits: bool
) -> None:
    disk_is_free, written = threading.Event(), []

    def write() -> None:
        assert disk_is_free.wait(10.0)
        written.append("a")

    opener = threading.Timer(0.5, disk_is_free.set)
    with pytest.raises(error), Writer() as writer:
        writer.start(write)
        opener.start()
        raise error
    assert bool(written) is waits
    disk_is_free.set()

"""The loop and its cadences, with an injected clock and real signals."""

import os
import signal
import subprocess
import sys

import pytest

from bert_cli.optim.loss_scale import first_loss_scale
from bert_cli.parallel.engine import StoppedBetweenMicroBatchesError
from bert_cli.train.loop import Every, StopRequest, train
from bert_cli.train.step import State


def state_at(step: int) -> State:
    return State({}, {}, first_loss_scale(1.0), step)


def batches(first: int, last: int):
    return ((step, {"input_ids": step}, 0.25) for step in range(first, last))


def test_hooks_are_told_in_order_and_when_they_are_due():
    state, told = state_at(3), []

    def step(batch):
        state.step += 1
        return {"loss": float(batch["input_ids"])}

    hooks = [
        (lambda info: info.metrics.update(seen=1.0), Every(steps=1)),
        (lambda info: told.append((info.step, info.metrics)), Every(steps=2, last_step=7)),
    ]
    assert train(state, batches(3, 7), step, hooks, lambda: False)
    assert told == [
        (4, {"loss": 3.0, "seen": 1.0}),
        (6, {"loss": 5.0, "seen": 1.0}),
        (7, {"loss": 6.0, "seen": 1.0}),
    ]


def test_minutes_count_from_the_last_time_whatever_made_it_due():
    now = 0.0
    every = Every(steps=10, minutes=1.0, clock=lambda: now)
    assert not every.due(1)
    now = 61.0
    assert every.due(2)
    now = 100.0
    assert every.due(10)
    now = 159.0
    assert not every.due(11)
    now = 161.0
    assert every.due(12)


def test_nothing_is_due_without_a_cadence_but_the_last_step():
    every = Every(last_step=5)
    assert [every.due(step) for step in range(1, 7)] == [False] * 4 + [True, False]


def test_a_stop_half_way_through_a_step_ends_the_loop_without_hooks():
    told = []

    def step(batch):
        raise StoppedBetweenMicroBatchesError

    assert not train(
        state_at(0), batches(0, 2), step, [(told.append, Every(steps=1))], lambda: True
    )
    assert told == []


def test_a_stop_after_a_step_tells_its_hooks_first():
    state, told = state_at(0), []

    def step(batch):
        state.step += 1
        return {}

    hook = (lambda info: told.append(info.step), Every(steps=1))
    assert not train(state, batches(0, 5), step, [hook], lambda: True)
    assert told == [1]


# SIGHUP: the terminal is closed.
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_signal_is_a_wish_and_handlers_are_given_back(number, capfd):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop()
        os.kill(os.getpid(), number)
        assert stop()
    assert signal.getsignal(number) is before
    assert f"{signal.Signals(number).name}: saving and stopping" in capfd.readouterr().err


def test_a_sigterm_that_a_scheduler_sends_twice_is_one_wish_and_a_later_one_stops_at_once():
    code = (
        "import os, signal, time\n"
        "from bert_cli.train import loop\n"
        "with loop.StopRequest() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('went on', stop(), flush=True)\n"
        "    loop.REPEAT_SECONDS = 0.2\n"
        "    time.sleep(0.3)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('and on')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "went on True\n"
    assert "KeyboardInterrupt" in done.stderr


def test_a_second_signal_stops_at_once():
    code = (
        "import os, signal, time\n"
        "from bert_cli.train.loop import StopRequest\n"
        "with StopRequest() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(1)\n"
        "    print('went on')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    assert "KeyboardInterrupt" in done.stderr
    assert "went on" not in done.stdout

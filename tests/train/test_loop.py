"""The loop, its cadences and stop requests, a step of an engine, and saving in the background."""

import math
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import tensorflow as tf

from bert_cli.errors import DeviceError
from bert_cli.optim.schedule import first_loss_scale
from bert_cli.parallel.engine import StoppedBetweenMicroBatchesError, UpdateResult
from bert_cli.train.loop import (
    SKIPPED_STEPS,
    BackgroundWriter,
    Every,
    State,
    Step,
    StopRequest,
    copy_state,
    train,
)


def run_of(first: int, last: int, hooks, stops: bool = False, step=None):
    """Train with a step that counts; return whether all steps were done, and the state."""
    state = State({}, {}, first_loss_scale(1.0), first)
    batches = ((number, {"input_ids": number}, 0.25) for number in range(first, last))

    def count_step(batch):
        state.step += 1
        return {"loss": float(batch["input_ids"])}

    return train(state, batches, step or count_step, hooks, lambda: stops), state


def test_hooks_run_in_order_when_they_are_due():
    seen = []
    hooks = [
        (lambda info: info.metrics.update(waited=info.seconds_waited), Every(steps=1)),
        (lambda info: seen.append((info.step, info.metrics)), Every(steps=2, last_step=7)),
    ]
    finished, _ = run_of(3, 7, hooks)
    assert finished
    assert seen == [(n, {"loss": n - 1.0, "waited": 0.25}) for n in (4, 6, 7)]


def test_a_cadence_is_of_steps_minutes_since_it_was_due_and_the_last_step_if_processes_agree(
    monkeypatch,
):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    every = Every(steps=10, minutes=2.0)
    due = []
    for now, step in ((0.0, 1), (121.0, 2), (200.0, 10), (319.0, 11), (321.0, 12)):  # noqa: B007
        due.append(every.due(step))
    assert due == [False, True, True, False, True]
    assert not Every(steps=1, agreed=lambda due: False).due(1)


def test_a_stop_during_a_step_ends_the_loop_without_hooks_and_one_after_it_runs_them():
    def stopped(batch):
        raise StoppedBetweenMicroBatchesError

    seen = []
    hooks = [(lambda info: seen.append(info.step), Every(steps=1))]
    assert not run_of(0, 2, hooks, stops=True, step=stopped)[0] and seen == []
    finished, state = run_of(0, 5, hooks, stops=True)
    assert not finished and seen == [state.step] == [1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_signal_requests_a_stop_and_the_second_stops_at_once(number, monkeypatch, capfd):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop()
        signal.raise_signal(number)
        # A scheduler may send SIGTERM twice, a closed terminal SIGHUP, which is one request.
        if number != signal.SIGINT:
            signal.raise_signal(number)
        assert stop()
        monkeypatch.setattr("bert_cli.processes.REPEAT_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before
    assert f"{signal.Signals(number).name}: saving and stopping" in capfd.readouterr().err


@pytest.mark.parametrize("how", ["no reader", "a full disk", "closed"])
def test_a_request_to_stop_is_noted_when_its_message_cannot_be_written(how):
    saved = os.dup(2)
    read, write = os.pipe()
    os.close(read)
    try:
        with StopRequest() as stop, open("/dev/full", "wb") as full:
            os.dup2(write if how == "no reader" else full.fileno(), 2)
            if how == "closed":
                os.close(2)
            signal.raise_signal(signal.SIGTERM)
            assert stop()
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(write)


def test_a_signal_that_is_ignored_at_the_start_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            stop.listen()
            signal.raise_signal(signal.SIGHUP)
            assert not stop()
            signal.raise_signal(signal.SIGTERM)
            assert stop()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


# --- a step


class Gradients:
    """Stands for an engine whose gradients have these norms."""

    def __init__(self, *norms: float) -> None:
        self.norms, self.asked = iter(norms), []

    def update(self, batch, request):
        self.asked.append((request.step, request.updates, request.loss_scale))
        numbers = request.first_micro_batch, request.micro_batches, request.learning_rate
        assert numbers == (4 * request.step, 4, 0.5 * request.step)
        assert batch == {"step": request.step} and request.max_gradient_norm == 3.0
        assert request.stop_requested()
        return UpdateResult({}, {"tokens": 6.0, "examples": 2.0}, next(self.norms), 7.0)

    def means(self, sums, counts):
        return {"mlm_loss": 6.0}


def add_step(engine, batch, request):
    return batch | {"step": request.step}


def test_steps_without_a_finite_gradient_are_no_updates_and_many_in_a_row_end_the_run():
    engine = Gradients(math.inf, 1.0, *[math.nan] * SKIPPED_STEPS)
    state = State({}, {}, first_loss_scale("dynamic"))
    scale = state.loss_scale.value
    micro_batches, rate = lambda n: range(4 * n, 4 * n + 4), lambda n: 0.5 * n
    step = Step(engine, state, micro_batches, rate, 3.0, lambda: True, add_step)
    rows = [step({}) for _ in range(SKIPPED_STEPS + 1)]
    assert rows[1] == {
        "mlm_loss": 6.0, "learning_rate": 0.5, "gradient_norm": 1.0, "weight_norm": 7.0, "loss_scale": scale / 2,
        "skipped": 1, "tokens": 6.0, "examples": 2.0,
    }  # fmt: skip
    assert SKIPPED_STEPS == 20
    problem = r"step 22: the gradient was not finite in 20 steps in a row \(loss scale 1\);"
    with pytest.raises(DeviceError, match=problem):
        step({})
    # The skipped steps do not count in the bias correction of those that follow.
    assert engine.asked[:4] == [
        (0, 0, scale), (1, 0, scale / 2), (2, 1, scale / 2), (3, 1, scale / 4)
    ]  # fmt: skip


# --- saving in the background


def test_a_copy_does_not_change_with_the_state():
    weight, first, second = (tf.Variable([float(number)]) for number in range(3))
    slots = {"w/moment1": first, "w/moment2": second}
    state = State({"w": weight}, slots, first_loss_scale(8.0), 5)
    copied = copy_state(state)
    for value in (weight, first, second):
        value.assign([7.0])
    assert copied.weights == {"w": [0.0]} and copied.step == 5
    assert copied.slots == {"w/moment1": [1.0], "w/moment2": [2.0]}


@pytest.fixture
def disk():
    """Writes that block until it is free."""
    free, written = threading.Event(), []

    def write() -> None:
        assert free.wait()
        written.append(len(written))

    yield SimpleNamespace(free=free, written=written, write=write)
    free.set()


def test_the_run_continues_during_a_write_and_a_second_write_waits_for_the_first(disk):
    with BackgroundWriter() as writer:
        writer.start(disk.write)
        writer.check()
        assert disk.written == []
        threading.Timer(0.05, disk.free.set).start()
        writer.start(disk.write)
        assert disk.written[0] == 0
    assert disk.written == [0, 1]


def test_an_error_of_a_write_is_raised_by_each_call_and_at_the_end():
    def fail() -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"), BackgroundWriter() as writer:
        writer.start(fail)
    for call in (writer.wait, writer.check, lambda: writer.start(fail)):
        with pytest.raises(OSError, match="full"):
            call()


@pytest.mark.parametrize(("error", "waits"), [(ValueError, True), (KeyboardInterrupt, False)])
def test_an_error_of_the_run_waits_for_the_write_and_a_second_ctrl_c_does_not(error, waits, disk):
    with pytest.raises(error), BackgroundWriter() as writer:
        writer.start(disk.write)
        if waits:
            threading.Timer(0.05, disk.free.set).start()
        raise error
    assert bool(disk.written) is waits

"""The training loop and its cadences, with an injected clock and real signals."""

import os
import signal

import pytest

from bert_cli.optim.schedule import first_loss_scale
from bert_cli.parallel.engine import StoppedBetweenMicroBatchesError
from bert_cli.train import loop
from bert_cli.train.loop import Every, State, StopRequest, train


class Run:
    """A state, a step that counts, and what its hooks saw."""

    def __init__(self, first: int, last: int):
        self.state = State({}, {}, first_loss_scale(1.0), first)
        self.batches = ((step, {"input_ids": step}, 0.25) for step in range(first, last))
        self.seen: list[tuple[int, dict[str, float]]] = []

    def step(self, batch):
        self.state.step += 1
        return {"loss": float(batch["input_ids"])}

    def note(self, info):
        assert info.seconds_waited == 0.25
        self.seen.append((info.step, info.metrics))


def test_hooks_run_in_order_when_they_are_due():
    run = Run(3, 7)
    hooks = [
        (lambda info: info.metrics.update(seen=1.0), Every(steps=1)),
        (run.note, Every(steps=2, last_step=7)),
    ]
    assert train(run.state, run.batches, run.step, hooks, lambda: False)
    assert run.seen == [
        (4, {"loss": 3.0, "seen": 1.0}),
        (6, {"loss": 5.0, "seen": 1.0}),
        (7, {"loss": 6.0, "seen": 1.0}),
    ]


def test_minutes_count_from_the_last_time_a_hook_was_due_for_any_reason():
    now = 0.0
    every = Every(steps=10, minutes=1.0, clock=lambda: now)
    due = []
    for now, step in ((0.0, 1), (61.0, 2), (100.0, 10), (159.0, 11), (161.0, 12)):  # noqa: B007
        due.append(every.due(step))
    assert due == [False, True, True, False, True]


def test_without_a_cadence_only_the_last_step_is_due_and_the_processes_may_disagree():
    every = Every(last_step=5)
    assert [every.due(step) for step in range(1, 7)] == [False] * 4 + [True, False]
    assert not Every(steps=1, agreed=lambda due: False).due(1)


def test_a_stop_during_a_step_ends_the_loop_without_hooks_and_one_after_it_runs_them():
    run = Run(0, 2)

    def stopped(batch):
        raise StoppedBetweenMicroBatchesError

    assert not train(run.state, run.batches, stopped, [(run.note, Every(steps=1))], lambda: True)
    assert run.seen == []
    run = Run(0, 5)
    assert not train(run.state, run.batches, run.step, [(run.note, Every(steps=1))], lambda: True)
    assert run.seen == [(1, {"loss": 0.0})]


# A process gets SIGHUP when its terminal is closed.
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_signal_requests_a_stop_and_the_second_stops_at_once(number, capfd, monkeypatch):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop()
        os.kill(os.getpid(), number)
        assert stop()
        monkeypatch.setattr(loop, "REPEAT_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before
    assert f"{signal.Signals(number).name}: saving and stopping" in capfd.readouterr().err


def test_a_sigterm_that_a_scheduler_sends_twice_is_one_request():
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop()
        # But Ctrl-C is another.
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)

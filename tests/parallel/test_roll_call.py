"""The roll call: all wait for all, a person is told for whom, and it can be stopped or comes to an end."""

import socket
import threading
import time

import pytest

from bert_cli.errors import DeviceError
from bert_cli.parallel import roll_call
from bert_cli.parallel.cluster import Processes
from bert_cli.parallel.roll_call import StoppedWhileJoiningError, call_the_roll


def free_ports(number: int) -> list[str]:
    held = [socket.create_server(("localhost", 0)) for _ in range(number)]
    found = [f"localhost:{one.getsockname()[1]}" for one in held]
    for one in held:
        one.close()
    return found


@pytest.mark.timeout(30)
def test_nobody_goes_on_before_all_are_there():
    workers = tuple(free_ports(3))
    gone_on: dict[int, float] = {}
    came: dict[int, float] = {}

    def process(rank: int) -> None:
        time.sleep(rank)
        came[rank] = time.monotonic()
        call_the_roll(Processes(workers, rank), 60)
        gone_on[rank] = time.monotonic()
        # As the runtime does: it listens on the port from now on.
        host, _, port = workers[rank].rpartition(":")
        with socket.create_server((host, int(port))):
            time.sleep(4)

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(gone_on) == 3
    assert min(gone_on.values()) >= came[2]
    assert max(gone_on.values()) < came[2] + 3


def test_a_process_alone_waits_for_nobody():
    call_the_roll(Processes(tuple(free_ports(1)), 0), 60)


def test_those_who_are_missing_are_named_with_where_they_should_be(capsys):
    here, there, other = free_ports(3)
    asked = iter([False] * 4 + [True])
    is_there = socket.create_server(("localhost", int(other.rpartition(":")[2])))
    with is_there, pytest.raises(StoppedWhileJoiningError):
        call_the_roll(Processes((here, there, other), 0), 0.6, lambda: next(asked))
    told = capsys.readouterr().err
    assert f"cluster: rank 0 ({here}) has waited " in told
    assert f" s for rank 1 ({there}) to start" in told
    assert other not in told


def test_one_who_does_not_come_ends_the_wait(monkeypatch):
    here, there = free_ports(2)
    monkeypatch.setattr(roll_call, "REGISTER_SECONDS", 1)
    with pytest.raises(DeviceError, match=rf"rank 0 \({there}\)\): did not come within 1 s; check"):
        call_the_roll(Processes((there, here), 1), 60)


def test_a_port_that_is_taken_is_named():
    here, there = free_ports(2)
    has_it = socket.create_server(("", int(here.rpartition(":")[2])))
    taken = rf"cluster \({here}\): its port cannot be taken"
    with has_it, pytest.raises(DeviceError, match=taken):
        call_the_roll(Processes((here, there), 0), 60)

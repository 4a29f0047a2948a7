"""What processes exchange, and whom a process names that waits for others."""

import threading
import time

import pytest
from support.threads import Threads, on_each_rank

from bert_cli.parallel import group as groups


def test_processes_exchange_numbers_in_the_order_of_their_ranks():
    def exchange(group):
        assert group.all_gather(group.rank + 0.5) == [0.5, 1.5, 2.5]
        assert group.broadcast([group.rank + 0.1, 1.0]) == [0.1, 1.0]
        assert group.all_reduce([[group.rank, 1]]).tolist() == [[3.0, 3.0]]
        group.barrier()
        assert group.collectives == 4 and not group.is_waiting.is_set()

    assert on_each_rank(exchange, 3) == [None] * 3


def test_a_process_that_waits_for_a_minute_names_the_ranks_that_are_late(monkeypatch, capsys):
    group, published = Threads(2, [None] * 4, None), []
    others = {0: "7 step 8", 1: "6 step 7, saving", 3: ""}
    group.collectives, group.activity = 7, "step 8"
    group.publish, group.published_by = published.append, lambda rank: others.get(rank, "7 mine")
    second = 0

    class Ended:
        def wait(self, seconds: float) -> bool:
            nonlocal second
            assert seconds == groups.POLL_SECONDS == 1.0
            second += 1
            if second == 30:
                group.is_waiting.set()
            elif second == 100:
                others[1] = "7 step 8"
            elif second == 150:  # enters the next one, as all others do
                group.collectives = 8
                others.update({rank: "8 step 8" for rank in (0, 1, 3)})
            elif second == 220:  # computes for long
                group.is_waiting.clear()
            return second == 300

    monkeypatch.setattr(time, "monotonic", lambda: float(second))
    groups._watch(group, Ended())
    assert published == ["7 step 8", "8 step 8"]
    assert capsys.readouterr().err.splitlines() == [
        "rank 2 has waited 60 s for rank 1 (step 7, saving) and rank 3 (nothing published yet)",
        "rank 2 has waited 120 s for rank 3 (nothing published yet)",
        "rank 2 has waited 60 s for the network",
    ]


@pytest.mark.parametrize("size", [1, 2])
def test_only_a_process_that_has_others_watches_them_and_while_it_runs(size, monkeypatch):
    monkeypatch.setattr(groups, "POLL_SECONDS", 0.005)
    group, published, threads = Threads(0, [None] * size, None), [], threading.active_count()
    group.publish = published.append
    with groups.watchdog(group):
        time.sleep(0.05)
    assert published == ["0 starting"] * (size - 1)
    assert threading.active_count() == threads

"""The progress bar of long commands on a terminal."""

import os
import pty

from bert_cli.progress import TerminalBar


def test_a_total_that_is_known_late_fills_the_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    master, slave = pty.openpty()
    with open(slave, "w") as stream, TerminalBar(stream, "download", None, 0) as bar:
        (task,) = bar.bar.tasks
        bar.show("download", 5)
        assert task.percentage == 0
        bar.total = 100
        bar.show("download", 50)
        assert task.percentage == 50
    os.close(master)

"""The contract of a stop request: a run saves when it is asked to stop, also where its terminal is closed.

`test_written_output` has the other ends that an output may have, and `test_loop` the signals.
"""

import os
import pty
import select
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from support.processes import wait_for
from support.tiny_models import TINY_RUN, flags_of, metrics_of

from bert_cli.train.checkpoint import complete_checkpoints, step_of

LONG = {"total-num-train-samples": 10_000_000, "checkpoint-every-steps": 1_000_000}
COMMAND = ["launch", "--processes", "1", "--", "pretrain", *flags_of({**TINY_RUN, **LONG})]


def steps_of(run: Path) -> int:
    return len(metrics_of(run)) if (run / "metrics.jsonl").exists() else 0


def run_until_the_terminal_is_closed(home: Path, script: str, ready: Callable[[], bool]) -> None:
    """Type a command at the prompt of an interactive shell, and close its terminal when the run is ready."""
    terminal, inside = pty.openpty()
    # The first terminal that the leader of a session opens is the one that controls it. JAX forbids a fork.
    shell = "exec bash --norc -i <{0} >{0} 2>&1".format(os.ttyname(inside))
    process = subprocess.Popen(
        ["bash", "-c", shell], cwd=home, start_new_session=True, env={**os.environ, "TERM": "xterm"}
    )
    os.write(terminal, f"bash -c {shlex.quote(script)}\n".encode())

    def ready_and_read() -> bool:
        if select.select([terminal], [], [], 0.05)[0]:
            os.read(terminal, 65536)
        return ready()

    wait_for(ready_and_read, [process])
    os.close(inside)
    os.close(terminal)
    process.wait()


def test_a_run_saves_when_its_terminal_is_closed(tmp_path):
    """A closed terminal sends SIGHUP; the run ends with 0 and a checkpoint of its last step."""
    run, exit_code = tmp_path / "run", tmp_path / "code"
    program = [sys.executable, "-m", "bert_cli", *COMMAND, "--save-ckpt-path", str(run)]
    # A shell in the terminal that survives SIGHUP and writes the exit code.
    script = f"trap : HUP; {shlex.join(program)}; echo $? > code"
    run_until_the_terminal_is_closed(tmp_path, script, lambda: steps_of(run) > 10)
    wait_for(lambda: exit_code.exists() and bool(exit_code.read_text()))
    assert exit_code.read_text() == "0\n"
    (checkpoint,) = complete_checkpoints(run)
    assert 10 < step_of(checkpoint) == steps_of(run)

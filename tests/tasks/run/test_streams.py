"""The contract of a stop request: a run saves when it is asked to stop, whatever has become of its output."""

import os
import pty
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import wait_for
from support.tiny_models import TINY_RUN, flags_of, metrics_of, write_model

from bert_cli.processes import STOP_SIGNALS
from bert_cli.train.checkpoint import complete_checkpoints, step_of

LONG = {"total-num-train-samples": 10_000_000, "checkpoint-every-steps": 1_000_000}
PRETRAIN = ["pretrain", *flags_of({**TINY_RUN, **LONG})]
TUNED = ["--max-seq-length", "32", "--num-epochs", "100000", "--pretrained-ckpt-path", "model"]
SQUAD = "squad --generated-dataset --max-query-length 8 --doc-stride 16"
EMBED = "embed --objective simcse --train-file texts.txt --no-do-validation"
COMMANDS = {
    "pretrain": PRETRAIN,
    "launch": ["launch", "--processes", "1", "--", *PRETRAIN],
    "squad": [*SQUAD.split(), *TUNED],
    "embed": [*EMBED.split(), *TUNED],
}
EVENTS = {
    "reader gone": "exec {} > >(head -c 100) 2>&1",
    "stderr closed": "exec {} > log 2> >(exec true)",
    "closed at start": "exec {} <&- >&- 2>&-",
    "disk full": "exec {} > /dev/full 2>&1",
    "nohup": "trap '' HUP; exec {} > log 2>&1",
    # A shell in the terminal that survives SIGHUP and writes the exit code.
    "terminal closed": "trap : HUP; {}; echo $? > code",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with a model and texts."""
    home = tmp_path_factory.mktemp("streams")
    write_model(home / "model")
    (home / "texts.txt").write_text("the film was good\nthe plot is very bad\n" * 20)
    return home


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


# Each event with a run and, where it meets the output, with the launcher, which prints the lines of its processes.
@pytest.mark.parametrize(
    ("event", "command", "number"),
    [
        ("terminal closed", "launch", signal.SIGHUP),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("reader gone", "squad", signal.SIGTERM),
                ("nohup", "pretrain", signal.SIGINT),
                ("reader gone", "launch", signal.SIGINT),
                ("stderr closed", "embed", signal.SIGHUP),
                ("closed at start", "launch", signal.SIGTERM),
                ("disk full", "launch", signal.SIGHUP),
                ("disk full", "pretrain", signal.SIGTERM),
                ("terminal closed", "embed", signal.SIGHUP),
            )
        ),
    ],
)
def test_a_run_saves_when_it_is_stopped_and_its_output_goes_nowhere(event, command, number, home):
    """A run ends with 0 and a checkpoint of its last step. A closed terminal sends SIGHUP itself."""
    run = home / f"{command}_{event.replace(' ', '_')}"
    program = [sys.executable, "-m", "bert_cli", *COMMANDS[command], "--save-ckpt-path", str(run)]
    script = EVENTS[event].format(shlex.join(program))
    if event == "terminal closed":
        run_until_the_terminal_is_closed(home, script, lambda: steps_of(run) > 10)
        exit_code = home / "code"
        wait_for(lambda: exit_code.exists() and bool(exit_code.read_text()))
        code = int(exit_code.read_text())
        exit_code.unlink()
    else:
        # Tests may run in the background, where Ctrl-C is ignored.
        hear_all = "--default-signal=" + ",".join(stop.name[3:] for stop in STOP_SIGNALS)
        with subprocess.Popen(["env", hear_all, "bash", "-c", script], cwd=home) as process:
            wait_for(lambda: steps_of(run) > 10, [process])
            if event == "nohup":
                process.send_signal(signal.SIGHUP)
                before = steps_of(run)
                wait_for(lambda: steps_of(run) > before + 20, [process])
            process.send_signal(number)
            code = process.wait()
    assert code == 0
    (checkpoint,) = complete_checkpoints(run)
    assert 10 < step_of(checkpoint) == steps_of(run)

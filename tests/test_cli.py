"""The door: commands, exit codes, and what is printed where."""

import os
import resource
import signal
import subprocess
import sys

import pytest

from bert_cli.cli import COMMANDS, TENSORFLOW_LEVELS, main
from bert_cli.config.help import LEVELS


def bert(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "bert_cli", *words], capture_output=True, text=True
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize(("ending", "code"), [("pass", 0), ("raise KeyboardInterrupt", 130)])
def test_a_signal_after_the_command_has_ended_does_not_change_the_exit_code(ending, code, number):
    program = f"""
import atexit, sys, time
from bert_cli import cli
def dispatch(arguments):
    {ending}
cli.dispatch = dispatch
atexit.register(lambda: (print("leaving", flush=True), time.sleep(0.3)))
sys.exit(cli.main())
"""
    words = [sys.executable, "-c", program]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout.readline() == "leaving\n"
        process.send_signal(number)
    assert process.returncode == code


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(words, capsys):
    assert main(words) == 0
    told = capsys.readouterr().out
    assert all(f"  {name} " in told for name in COMMANDS)


def test_the_version_names_the_parts_that_decide_numbers(capsys):
    assert main(["--version"]) == 0
    told = capsys.readouterr().out
    assert "tensorflow 2.21" in told and "keras 3.15" in told
    assert told.startswith("bert ") and "\npython 3." in told


def test_an_unknown_command_is_answered_with_the_nearest_one(capsys):
    assert main(["pre-train"]) == 2
    assert "did you mean 'pretrain'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_its_options(name, capsys):
    with pytest.raises(SystemExit) as end:
        main([*name.split(), "--help"])
    assert end.value.code == 0
    told = capsys.readouterr().out
    assert f"usage: bert {name}" in told
    assert f"  bert {name} " in told.partition("examples:")[2] + " "


def test_a_mistake_goes_to_standard_error_with_its_code_and_no_traceback():
    done = bert("tokenize", "nowhere", "out", "--vocab", "nowhere.txt")
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.startswith("bert: ") and "Traceback" not in done.stderr


def test_a_place_that_cannot_be_written_is_a_message_and_no_traceback(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a").write_text('<doc id="1" url="" title="t">\nt\n\nOne. Two.\n</doc>\n')
    done = bert("preprocess", str(tmp_path / "text"), "/proc/nowhere")
    assert done.returncode == 3, done.stderr
    assert "/proc/nowhere" in done.stderr and "Traceback" not in done.stderr


def test_a_reader_that_hangs_up_is_no_error():
    code = f"{sys.executable} -m bert_cli --help | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("usage: bert") and done.stderr == ""


@pytest.mark.parametrize("words", [["--log-level", "warning"], ["--log-level=warning"]])
@pytest.mark.parametrize("first", [True, False])
def test_a_log_level_stands_before_or_behind_the_command(words, first, monkeypatch, capsys):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    with pytest.raises(SystemExit):
        main([*words, "index", "--help"] if first else ["index", *words, "--help"])
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "1"
    assert "usage: bert index" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--log-level", "loud", "index"], ["index", "--log-level"]])
def test_a_log_level_that_there_is_not_is_refused_with_those_that_there_are(words, capsys):
    assert main(words) == 2
    assert "--log-level: takes one of debug, info, warning, error" in capsys.readouterr().err


def test_every_level_that_is_told_has_one_of_tensorflows():
    assert set(TENSORFLOW_LEVELS) == set(LEVELS)


def test_a_log_level_behind_dashes_is_the_other_commands(monkeypatch, capsys):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    run = ["pretrain", "--config", "pretrain_demo_128_phase1", "--generated-dataset"]
    assert main(["launch", "--dry-run", "--", *run, "--log-level", "info"]) == 0
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "3"
    assert "--generated-dataset --log-level info" in capsys.readouterr().out


def test_the_longest_help_takes_less_than_a_second_of_work():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert bert("squad", "--help").returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0

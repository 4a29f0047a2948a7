"""The door: commands, exit codes, and what is printed where."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from bert_cli import cli
from bert_cli.cli import COMMANDS, TENSORFLOW_LEVELS, main
from bert_cli.commands import Command
from bert_cli.parse.options import LOG_LEVELS


def test_a_signal_after_the_command_has_ended_does_not_change_the_exit_code():
    program = """
import atexit, sys, time
from bert_cli import cli
def dispatch(arguments):
    raise KeyboardInterrupt
cli.dispatch = dispatch
atexit.register(lambda: (print("leaving", flush=True), time.sleep(0.3)))
sys.exit(cli.main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"leaving\n"
        process.send_signal(signal.SIGHUP)
    assert process.returncode == 130


def test_every_command_has_a_help_and_the_version_names_packages(bert, capsys):
    assert bert().out == bert("--help").out
    text = bert("--version").out
    assert text.startswith("bert ") and "\npython 3." in text and "tensorflow 2.21" in text
    for name in COMMANDS:
        with pytest.raises(SystemExit) as end:
            main([*name.split(), "--help"])
        assert end.value.code == 0
        assert f"usage: bert {name}" in capsys.readouterr().out


def test_a_system_without_file_locks_is_one_line():
    hidden = "import sys; sys.modules['fcntl'] = None; import bert_cli.cli"
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True)
    assert done.returncode == 5 and done.stdout == ""
    assert done.stderr == "bert: linux: has no file locks; use Linux, on Windows in WSL2\n"


def test_a_missing_file_or_column_of_a_training_is_found_before_tensorflow_is_loaded(tmp_path):
    (tmp_path / "table.csv").write_text("a,b\n1,2\n")
    code = (
        "import sys\nfrom bert_cli.cli import main\n"
        "words = ['classify', '--pretrained-ckpt-path', 'model', '--save-ckpt-path', 'run', '--train-file']\n"
        "assert [main([*words, name]) for name in ('no.csv', 'table.csv')] == [3, 3]\n"
        "print({'tensorflow', 'keras'} & {*sys.modules})"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "set()\n", done.stderr
    assert "no.csv: no such file" in done.stderr and "has no column 'text'" in done.stderr


@pytest.mark.parametrize("name", [name for name in COMMANDS if COMMANDS[name].module])
def test_the_code_of_every_command_is_where_the_table_says(name):
    assert callable(COMMANDS[name].run_function())


@pytest.mark.parametrize(
    ("name", "make", "command", "message"),
    [
        ("out", Path.touch, "download --sample", "must be a folder"),
        ("out/.done/lock", lambda path: path.symlink_to(path.name), "download --sample", "lock: Too many levels of"),
        ("out/corpus.json", lambda path: path.write_text('{"format": 1}'), "inspect", "(masking): Field required"),
    ],
)  # fmt: skip
def test_a_file_or_folder_that_cannot_be_used_is_a_message(
    name, make, command, message, tmp_path, bert
):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    make(path)
    printed = bert(*command.split(), tmp_path / "out", code=3)
    assert printed.err.startswith("bert: ") and message in printed.err and printed.out == ""
    assert str(tmp_path) in printed.err and "Traceback" not in printed.err


def test_an_error_of_the_system_is_a_message_and_a_defect_keeps_its_traceback(monkeypatch, bert):
    def fail_with(error: Exception) -> None:
        def fail(arguments):
            raise error

        monkeypatch.setattr(cli, "dispatch", fail)

    request = httpx2.Request("GET", "http://a/b")
    for error, code, message in (
        (OSError(errno.EIO, "Input/output error", "/data/a"), 3, "/data/a: Input/output error; "),
        (OSError(errno.ENOSPC, "No space left on device"), 3, "No space left on device; "),
        (httpx2.TooManyRedirects("too many", request=request), 3, "http://a/b: too many; "),
        (httpx2.InvalidURL("no port"), 3, "network: no port; "),
        (MemoryError("7 TiB for an array"), 5, "memory: 7 TiB for an array; "),
    ):
        fail_with(error)
        assert message in bert(code=code).err
    ours = OSError(errno.ENOENT, "ours", cli.__file__)
    # A pipe that breaks elsewhere, as to a worker process, is not the reader of the output.
    for error in (OSError("no number"), ours, KeyError(), BrokenPipeError(32, "a pipe")):
        fail_with(error)
        with pytest.raises(type(error)):
            main([])


@pytest.mark.parametrize(
    ("command", "code", "printed"),
    [
        ("--help | head -1", 0, "usage: bert COMMAND [options]"),
        ("runs . --json - | true", 0, ""),
        ("--help >&-", 0, ""),
        ("--help <&- >&- 2>&-", 0, ""),
        ("--version > /dev/full", 3, "bert: standard output: No space left on device"),
        ("plan --help > /dev/full", 3, "bert: standard output: No space left on device"),
        ("runs . > /dev/full", 3, "bert: standard output: No space left on device"),
        ("runs nowhere 2>&-", 3, ""),
        ("runs nowhere 2> /dev/full", 3, ""),
        ("runs nowhere 2>&1 | true", 3, ""),
        ("preprocess a.txt out 2>&1 | true", 0, ""),
        ("preprocess a.txt out > /dev/full 2>&1", 0, ""),
        ("preprocess a.txt out <&- >&- 2>&-", 0, ""),
        ("preprocess a.txt out --processes 2 <&- >&- 2>&-", 0, ""),
    ],
)
def test_a_log_that_cannot_be_written_is_lost_and_a_result_is_an_error(
    command, code, printed, tmp_path
):
    (tmp_path / "a.txt").write_text("A sentence is here. Another one is there.\n")
    shell = ["bash", "-o", "pipefail", "-c", f"{sys.executable} -m bert_cli {command}"]
    done = subprocess.run(shell, capture_output=True, text=True, cwd=tmp_path)
    text = (done.stdout + done.stderr).partition(";")[0].strip()
    assert (done.returncode, text) == (code, printed)
    assert (tmp_path / "out" / "manifest.json").exists() == command.startswith("preprocess")


@pytest.mark.parametrize(
    ("words", "continues"),
    [
        ("index a", True),
        ("pretrain --config pretrain_demo_128_phase1", True),
        ("pretrain --config pretrain_demo_128_phase1 --dry-run", False),
        ("launch -- pretrain", True),
        ("launch -- bench pretrain", False),
        ("predict a b", False),
        ("plan pretrain --config pretrain_demo_128_phase1", False),
        ("export a b --format onnx", False),
        ("inspect a", False),
    ],
)
def test_ctrl_c_promises_that_the_command_continues_only_where_it_does(
    words, continues, monkeypatch, bert
):
    def interrupted(settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(Command, "run_function", lambda command: interrupted)
    printed = bert(*words.split(), code=130).err.splitlines()[-1]
    assert printed == "bert: interrupted" + "; the same command continues" * continues


def test_the_environment_may_turn_onednn_off():
    program = "from bert_cli.processes import quiet_imports\nwith quiet_imports():\n    import os"
    words = [sys.executable, "-c", f"{program}\nprint(os.environ['TF_ENABLE_ONEDNN_OPTS'])"]
    environment = os.environ | {"TF_ENABLE_ONEDNN_OPTS": "0"}
    assert subprocess.check_output(words, text=True, env=environment) == "0\n"


def test_a_log_level_is_before_or_after_the_command(monkeypatch, bert, capsys):
    for words in ("--log-level warning index --help", "index --log-level=warning --help"):
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
        with pytest.raises(SystemExit):
            main(words.split())
        assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "1"
        assert "usage: bert index" in capsys.readouterr().out
    for words in (["--log-level", "loud", "index"], ["index", "--log-level"]):
        assert "--log-level: takes one of debug, info, warning, error" in bert(*words, code=2).err
    assert set(TENSORFLOW_LEVELS) == set(LOG_LEVELS)

    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    # Behind dashes it belongs to the other command.
    run = ["pretrain", "--config", "pretrain_demo_128_phase1", "--generated-dataset"]
    assert main(["launch", "--dry-run", "--", *run, "--log-level", "info"]) == 0
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "3"
    assert "--generated-dataset --log-level info" in capsys.readouterr().out

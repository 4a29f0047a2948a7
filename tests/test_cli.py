"""The door: commands, exit codes, and what is printed where."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from bert_cli import cli
from bert_cli.cli import COMMANDS, TENSORFLOW_LEVELS, main
from bert_cli.config.options import LOG_LEVELS


def bert(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "bert_cli", *words], capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("ending", "code", "number"),
    [("pass", 0, signal.SIGTERM), ("raise KeyboardInterrupt", 130, signal.SIGHUP)],
)
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


def test_help_version_and_an_unknown_command(capsys):
    for words in ([], ["--help"], ["-h"]):
        assert main(words) == 0
        text = capsys.readouterr().out
        assert all(f"  {name} " in text for name in COMMANDS)
    assert main(["--version"]) == 0
    text = capsys.readouterr().out
    assert "tensorflow 2.21" in text and "keras 3.15" in text
    assert text.startswith("bert ") and "\npython 3." in text
    assert main(["pre-train"]) == 2
    assert "did you mean 'pretrain'?" in capsys.readouterr().err


def test_every_command_has_help_with_its_options(capsys):
    for name in COMMANDS:
        with pytest.raises(SystemExit) as end:
            main([*name.split(), "--help"])
        assert end.value.code == 0
        text = capsys.readouterr().out
        assert f"usage: bert {name}" in text
        assert f"  bert {name} " in text.partition("examples:")[2] + " "


def test_a_mistake_goes_to_standard_error_with_its_code_and_no_traceback():
    done = bert("tokenize", "nowhere", "out", "--vocab", "nowhere.txt")
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.startswith("bert: ") and "Traceback" not in done.stderr


def test_a_folder_that_cannot_be_written_is_a_message(tmp_path, capsys):
    (tmp_path / "a").write_text("One.\n")
    words = ["preprocess", "--sentence-splitter", "lines", str(tmp_path), "/proc/nowhere"]
    assert main(words) == 3
    assert "/proc/nowhere" in capsys.readouterr().err


TEXT = Path(__file__).parents[1] / "data" / "sample" / "articles"


def deep(path):
    path.write_text("[" * 100_000)


def loop(path):
    path.symlink_to(path.name)


def described(**changes):
    def write(path):
        fields = dict.fromkeys(("masked_lm_prob", "whole_word_masking"))
        fields |= {"format": "static", "sequence_length": 16, "mask_tokens": 4, "vocab_size": 30}
        fields |= {"vocab_sha256": "", "token_bytes": 2, "tokenizer": {}, "records": 1}
        fields |= {"files": [{"name": "a.tfrecord", "bytes": 1, "records": 1}], "fingerprint": ""}
        fields |= {"special_ids": {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}}
        path.write_text(json.dumps(fields | changes))

    return write


@pytest.mark.parametrize(
    ("place", "make", "words", "told"),
    [
        ("out", Path.touch, ["download", "--sample"], "must be a folder"),
        ("out", loop, ["download", "--sample"], "out/.done: Too many levels"),
        ("out", Path.touch, ["preprocess", "--sentence-splitter", "lines", str(TEXT)], "out"),
        ("out/.done/lock", loop, ["download", "--sample"], "out/.done/lock: Too many levels of"),
        ("out/.done/settings.json", deep, ["download", "--sample"], "recursion limit"),
        ("out/corpus.json", deep, ["inspect"], "recursion limit"),
        ("out/corpus.json", loop, ["inspect"], "corpus.json: does not exist"),
        ("out/corpus.json", described(sequence_length="128"), ["inspect"], "(sequence_length): Input should be a"),
        ("out/corpus.json", described(mask_tokens=10**15), ["inspect"], "(mask_tokens): Input should be less"),
        (
            "out/corpus.json", described(files=[{"name": "../a", "bytes": 1, "records": 1}]), ["inspect"],
            "(files.0.name): Value error, a file outside",
        ),
    ],
)  # fmt: skip
def test_what_a_users_file_or_folder_refuses_is_a_message(
    place, make, words, told, tmp_path, capsys
):
    path = tmp_path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    make(path)
    assert main([*words, str(tmp_path / "out")]) == 3
    shown = capsys.readouterr().err
    assert shown.startswith("bert: ") and str(tmp_path) in shown and told in shown


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (OSError(errno.EIO, "Input/output error", "/data/a"), 3, "/data/a: Input/output error; "),
        (OSError(errno.ENOSPC, "No space left on device"), 3, "No space left on device; "),
        (httpx.TooManyRedirects("too many", request=httpx.Request("GET", "http://a/b")), 3, "http://a/b: too many; "),
        (httpx.InvalidURL("no port"), 3, "network: no port; "),
        (MemoryError("7 TiB for an array"), 5, "memory: 7 TiB for an array; "),
    ],
)  # fmt: skip
def test_what_the_system_or_the_network_refuses_is_a_message(
    error, code, told, monkeypatch, capsys
):
    def refuse(arguments):
        raise error

    monkeypatch.setattr(cli, "dispatch", refuse)
    assert main([]) == code
    assert told in capsys.readouterr().err


def test_a_defect_of_the_tool_keeps_its_traceback(monkeypatch):
    ours = OSError(errno.ENOENT, "ours", cli.__file__)
    for error in (OSError(errno.EIO, "no path"), ours, KeyError()):

        def fail(arguments, error=error):
            raise error

        monkeypatch.setattr(cli, "dispatch", fail)
        with pytest.raises(type(error)):
            main([])


def test_a_reader_that_hangs_up_is_no_error():
    code = f"{sys.executable} -m bert_cli --help | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("usage: bert") and done.stderr == ""


def test_a_log_level_is_before_or_after_the_command(monkeypatch, capsys):
    for words in (
        ["--log-level", "warning", "index", "--help"],
        ["index", "--log-level=warning", "--help"],
    ):
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
        with pytest.raises(SystemExit):
            main(words)
        assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "1"
        assert "usage: bert index" in capsys.readouterr().out
    for words in (["--log-level", "loud", "index"], ["index", "--log-level"]):
        assert main(words) == 2
        assert "--log-level: takes one of debug, info, warning, error" in capsys.readouterr().err
    assert set(TENSORFLOW_LEVELS) == set(LOG_LEVELS)


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

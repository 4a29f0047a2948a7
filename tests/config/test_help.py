"""What `bert COMMAND --help` prints."""

import shlex

import pytest

from bert_cli.commands import COMMANDS
from bert_cli.config.bench import expand_benchmark
from bert_cli.config.help import WIDEST, help_of
from bert_cli.config.load import parse_flags
from bert_cli.config.options import examples_of


def settings_of(name):
    return COMMANDS[name].settings_class()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_two_or_three_examples_whose_flags_there_are(name):
    examples = examples_of(settings_of(name))
    assert 2 <= len(examples) <= 3
    for example in examples:
        words = shlex.split(example.partition(" -- ")[0].partition(" > ")[0])
        if name == "bench":
            words = ["bert", *expand_benchmark(words[1:])]
        if words[1] == "bench" and words[2:] != ["--list"]:
            name = " ".join(words[1:3])
        first = ["bert", *name.split()]
        assert words[: len(first)] == first
        rest = words[len(first) :]
        if "--config" in rest:
            at = rest.index("--config")
            rest = rest[:at] + rest[at + 2 :]
        parse_flags(settings_of(name), rest, f"bert {name}", {})


@pytest.mark.parametrize("columns", ["60", "300"])
def test_a_help_is_as_wide_as_the_terminal_and_no_wider_than_is_read_well(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    lines = help_of(settings_of("pretrain"), "pretrain").partition("examples:")[0].splitlines()
    # A choice of four words is longer than a narrow terminal.
    lines = [line for line in lines if not line.strip().startswith("--")]
    assert max(map(len, lines)) <= min(int(columns), WIDEST)


def test_a_help_ends_with_what_every_command_takes_and_examples():
    told = help_of(settings_of("tokenize"), "tokenize")
    assert told.startswith("usage: bert tokenize [options] INPUT OUT\n")
    assert told.index("options of bert tokenize:") < told.index(
        "Where the shards of a step are done"
    )
    assert told.index("--log-level") < told.index("\nexamples:\n  bert tokenize data/sentences")
    assert "ifdef" not in told and "SUPPRESS" not in told


def test_what_may_be_left_out_or_repeated_is_marked_in_the_usage():
    assert help_of(settings_of("runs"), "runs").startswith(
        "usage: bert runs [options] [FOLDERS ...]"
    )
    assert help_of(settings_of("plot"), "plot").startswith("usage: bert plot [options] RUNS ...")
    usage = help_of(settings_of("launch"), "launch").splitlines()[0]
    assert usage.endswith("-- COMMAND [options]")

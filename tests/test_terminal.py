"""Colours are for terminals; what goes into a file is plain and whole."""

import io
import sys

import pytest

from bert_cli.processes import print_help, print_table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def a_terminal(monkeypatch) -> None:
    """Not a fixture: pytest takes standard output anew between that and the test."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", Terminal())


def test_a_help_has_its_headings_marked_on_a_terminal_only(monkeypatch):
    a_terminal(monkeypatch)
    print_help("options:\n  --size INT  a number\n")
    marked = sys.stdout.getvalue()
    assert "\x1b[1moptions:" in marked and "\x1b[36m--size" in marked
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    print_help("options:\n  --size INT  a number\n")
    assert sys.stdout.getvalue() == "options:\n  --size INT  a number\n"


@pytest.mark.parametrize("variable", [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_who_wants_no_colour_gets_none_on_a_terminal_either(monkeypatch, variable):
    a_terminal(monkeypatch)
    monkeypatch.setenv(*variable)
    print_help("options:\n  --size INT  a number")
    print_table(("name", "value"), [("a", "b")])
    assert "\x1b[" not in sys.stdout.getvalue()


def test_a_row_is_one_line_where_there_is_no_terminal(capsys):
    long = "/a/very/long/folder" * 20
    print_table(("run", "step"), [(long, "7"), ("b [bold]", "1,234")], right=[1])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "step"]
    assert lines[1].split() == [long, "7"]
    assert lines[2].startswith("b [bold]") and len(lines[2]) == len(lines[1])
    assert not any(line.endswith(" ") for line in lines)


def test_a_long_cell_goes_on_below_itself_on_a_terminal(monkeypatch):
    a_terminal(monkeypatch)
    print_table(("run", "step"), [("x" * 60, "7")])
    lines = sys.stdout.getvalue().splitlines()
    assert max(len(line) for line in lines[1:]) <= 40
    assert sum(line.count("x") for line in lines) == 60

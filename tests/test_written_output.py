"""Standard output and standard error of a command, whoever writes to them and wherever they lead."""

import os
import pty
import subprocess
import sys

import pytest

from bert_cli.processes import print_error, print_line

WRITES = """
import logging, os, subprocess, sys, threading
from bert_cli.processes import console, note, open_streams, print_error, print_line
open_streams()
file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
assert file > 2
print_line("a line"), print_error("an error"), print("a \\u0142etter, and \\udce9"), note("a note")
console().print("rich"), console(stream=sys.stderr).print("rich")
sys.stdout.buffer.write(b"bytes" * 10_000)
logging.error("logging")
for call in (print, sys.stderr.write):
    thread = threading.Thread(target=call, args=("a thread",))
    thread.start(), thread.join()
assert subprocess.run(["true"]).returncode == 0
os.write(file, b"went on")
sys.stdout.write("left for the end of Python")
"""


@pytest.mark.parametrize("errors", ["2>&-", "2> /dev/full", "2> >(exec true)"])
@pytest.mark.parametrize("output", ["> /dev/full", ">&-", "> >(exec true)", ">&{terminal}"])
def test_no_writer_can_end_a_command_that_nobody_reads(output, errors, tmp_path):
    terminal, closed = pty.openpty()
    os.close(terminal)  # a write to the other end is EIO
    script = f'exec "$@" <&- {output.format(terminal=closed)} {errors}'
    words = ["bash", "-c", script, "bash", sys.executable, "-c", WRITES, str(tmp_path / "file")]
    done = subprocess.run(words, pass_fds=[closed], env={**os.environ, "PYTHONIOENCODING": "ascii"})
    os.close(closed)
    assert done.returncode == 0
    assert (tmp_path / "file").read_bytes() == b"went on"


def test_a_printed_line_shows_all_control_characters_but_tabs_and_line_ends(capsys):
    for print_text in (print_line, print_error):
        print_text("a\tb\nc\rd\x1b[2Je")
    assert [*capsys.readouterr()] == ["a\tb\nc\\u000dd\\u001b[2Je\n"] * 2


def test_output_to_a_slow_reader_is_complete_where_another_program_made_it_non_blocking():
    code = (
        "import os\nfrom bert_cli.processes import open_streams, print_line\n"
        "open_streams()\nos.set_blocking(1, False)\nprint_line('x' * 1_000_000)"
    )
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert len(process.stdout.read()) == 1_000_001
    assert process.returncode == 0


def test_a_worker_process_can_print_where_nobody_reads():
    code = (
        "from multiprocessing import Pipe\nfrom bert_cli.processes import die_with_parent\n"
        "ends = Pipe(False)\ndie_with_parent(ends[0])\nprint('a line', flush=True)"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=full)
    assert done.returncode == 0

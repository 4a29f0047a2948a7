"""A shard is complete or absent, however a run ends."""

import errno
import fcntl
import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from support.processes import alive, wait_for
from support.shards import make_inputs, prepared_shards, shout, start_shout, tree
from support.terminal import Terminal

from bert_cli import files, progress
from bert_cli.data.io import manifest
from bert_cli.data.io.inputs import find_files
from bert_cli.data.io.manifest import Shard, Stats, Step, make_shard, read_manifest
from bert_cli.data.workers import runner
from bert_cli.data.workers.pool import run_in_threads
from bert_cli.data.workers.runner import Workers, run_shards
from bert_cli.errors import DataError


def fail(inputs, output, error=None):
    output.write_text("half")
    raise error or DataError(str(inputs[0]), "is bad", "fix it")


def give_nothing(inputs, output):
    output.write_text("")
    return Stats(notes=("nothing here",))


def run(shards, out, processes=1, convert=shout, expected_bytes=None, **settings):
    step = Step("shout", out, settings, expected_bytes=expected_bytes)
    return run_shards(step, shards, convert, Workers(processes))


def markers(folder):
    return len(list((folder / "out" / ".done").rglob("*.shard")))


def descendants(pid):
    children = [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [inner for child in children for inner in descendants(child)]


@pytest.mark.parametrize("processes", [1, 2])
def test_every_shard_is_converted_and_counted(tmp_path, processes, capsys):
    manifest = run(make_inputs(tmp_path), tmp_path / "out", processes)
    assert (tmp_path / "out/AA/02").read_text() == "TEXT 2 " * 50
    assert (tmp_path / "out/AA/02.index").read_text() == "0 5\n"
    assert manifest == read_manifest(tmp_path / "out")
    assert manifest["counts"]["documents"] == 4
    assert manifest["counts"]["bytes_in"] == manifest["counts"]["letters"] == 4 * 350
    outputs = [tmp_path / f"out/AA/0{n}" for n in range(4)]
    assert find_files(tmp_path / "out", manifest) == outputs
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("shout: 4 documents, 0.0 MB in, 0.0 MB out, ")


def test_a_summary_has_the_counts_that_are_not_0_and_the_speed_of_this_run():
    stats = Stats(documents=4, records=7, bytes_in=3_000_000, bytes_out=1_500_000)
    assert runner.summary("shout", stats, 2.0, 1_000_000, "2 of 4") == (
        "shout: 4 documents, 7 records, 3.0 MB in, 1.5 MB out, 0.5 MB/s, 2.0 s "
        "(2 of 4 shards were done before)"
    )
    assert runner.summary("a", Stats(bytes_in=1), 2.04, 0) == "a: 0.0 MB in, 0.0 MB out, 2.0 s"


def test_a_manifest_has_the_time_and_the_speed_of_its_run(tmp_path):
    values = (Step("a", tmp_path), Stats(3, bytes_in=9), 1.23456, 5_000_000, [])
    record = manifest.write_manifest(tmp_path / "a", *values, more=7)
    found = [record[name] for name in ("seconds", "mb_per_second", "more", "shards")]
    assert found == [1.235, 4.05, 7, []] and record["counts"]["bytes_in"] == 9


def test_files_are_read_in_threads_until_one_fails():
    read: list[int] = []
    assert run_in_threads("read", 6, lambda number: number, [1, 2, 3], 2) == 6

    def fail(number):
        read.append(number)
        time.sleep(0.005)
        return 1 // number

    with pytest.raises(ZeroDivisionError):
        run_in_threads("read", 6, fail, range(300), 1)
    assert len(read) < 300


def with_note(inputs, output):
    return shout(inputs, output) + Stats(notes=(f"a note of {output.name}",))


@pytest.mark.parametrize("number", [5, 6])
def test_five_notes_are_printed_and_the_manifest_has_all(number, tmp_path, capsys):
    manifest = run(make_inputs(tmp_path, number), tmp_path / "out", convert=with_note)
    printed = capsys.readouterr().out
    assert printed.count("a note of") == 5 and ("1 more notes in" in printed) == (number == 6)
    assert "0 more" not in printed and len(manifest["notes"]) == number


@pytest.mark.parametrize("processes", [1, 2])
def test_outputs_with_similar_names_are_made_in_folders_of_their_own(tmp_path, processes):
    names = ["a/b", "a+b", "c/a/b", "c+a/b", "x" * 200]
    (shard,) = make_inputs(tmp_path, 1)
    shards = [Shard(shard.inputs, Path(name)) for name in names]
    with runner.open_output(Step("shout", tmp_path / "out")) as output:
        assert len({output.begin(shard).folder for shard in shards}) == len(names)
    run(shards, tmp_path / "out", processes)
    assert all((tmp_path / "out" / name).is_file() for name in names)


def test_complete_shards_are_skipped_and_missing_ones_made(tmp_path, capsys):
    shards, out = make_inputs(tmp_path), tmp_path / "out"
    seconds = run(shards, out)["seconds"]
    times = {name: (out / name).stat().st_mtime_ns for name in tree(out)}
    assert run(shards, out)["seconds"] == seconds
    assert "4 of 4 shards were done before" in capsys.readouterr().out
    for name in ("AA/01", "AA/02.index"):
        (out / name).unlink()
    names = (".manifest.json", ".done/.templates.xml", ".done/AA/.01")
    leftovers = [out / f"{name}.0123456789ab.part" for name in names]
    for path in leftovers:
        path.touch()
    run(shards, out)
    assert not any(path.exists() for path in leftovers)
    changed = sorted(n for n in times if (out / n).stat().st_mtime_ns != times[n])
    assert changed == ["AA/01", "AA/01.index", "AA/02", "AA/02.index"]
    assert "2 of 4 shards were done before" in capsys.readouterr().out


def test_a_folder_of_other_settings_inputs_or_steps_is_rejected(tmp_path):
    shards, out = make_inputs(tmp_path), tmp_path / "out"
    run(shards, out, language="english", mood="calm")
    with pytest.raises(DataError, match="language was 'english', now 'german'") as error:
        run(shards, out, language="german", mood="calm")
    assert "mood" not in str(error.value)
    with pytest.raises(DataError, match=r"mood was 'calm', now the default"):
        run(shards, out, language="english")
    with pytest.raises(DataError, match="holds the output of `bert shout`"):
        run_shards(Step("whisper", out), shards, shout, Workers())
    both = Shard(shards[0].inputs + shards[1].inputs, shards[0].output)
    for other, name in ((shards[:3], "03"), ([both], "00")):
        with pytest.raises(DataError, match=rf"AA/{name}: was made from .* changed since; move"):
            run(other, out, language="english", mood="calm")
    run([both], tmp_path / "two")
    shards[1].inputs[0].write_text("new text")
    with pytest.raises(
        DataError, match=r"made from inputs \(2 files, 00 to 01\) that have changed"
    ):
        run([both], tmp_path / "two")
    problem = r"AA/01: was made from inputs .*\(01\) that have changed since"
    with pytest.raises(DataError, match=problem):
        run(shards, out, language="english", mood="calm")


def test_files_of_others_are_not_overwritten_and_a_folder_in_use_is_refused(tmp_path):
    (tmp_path / "out/AA").mkdir(parents=True)
    (tmp_path / "out/AA/00").write_text("mine")
    with pytest.raises(DataError, match="not made by `bert shout`"):
        run(make_inputs(tmp_path), tmp_path / "out")
    assert (tmp_path / "out/AA/00").read_text() == "mine"
    with pytest.raises(DataError, match=r"in/00\): is a file and must be a folder"):
        run(make_inputs(tmp_path), tmp_path / "in/00/deeper")
    with (
        runner.open_output(Step("shout", tmp_path / "used")),
        pytest.raises(DataError, match="another process is using it"),
    ):
        run(make_inputs(tmp_path), tmp_path / "used")


def test_a_run_that_fails_or_gives_nothing_leaves_no_manifest(tmp_path):
    for processes in (1, 2):
        with pytest.raises(DataError, match="is bad; fix it"):
            run(make_inputs(tmp_path), tmp_path / "out", processes, fail)
        assert tree(tmp_path / "out") == {} and not (tmp_path / "out/.partial").exists()
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="space"):
        run(make_inputs(tmp_path), tmp_path / "out", convert=partial(fail, error=full))
    with pytest.raises(DataError, match="has not finished"):
        find_files(tmp_path / "out", read_manifest(tmp_path / "out"))
    with pytest.raises(DataError, match=r"no documents in 4 shards \(nothing here\)"):
        run(make_inputs(tmp_path), tmp_path / "out", convert=give_nothing)
    assert not (tmp_path / "out/manifest.json").exists()


def test_prepared_inputs_are_few_at_a_time_and_only_for_missing_shards(tmp_path):
    out = tmp_path / "out"
    shards, prepared = prepared_shards(tmp_path, out)
    run(shards, out, processes=2, convert=partial(shout, pause=0.05))
    assert [number for number, _ in prepared] == list(range(12))
    assert max(most for _, most in prepared) == 4  # two for each process: none waits for the next
    assert (out / "07").read_text() == "CHUNK 7"
    (out / "07").unlink()
    run(shards, out)
    assert [number for number, _ in prepared] == [*range(12), 7]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_step_killed_by_signal_9_continues_to_the_same_files(tmp_path, processes):
    shards = make_inputs(tmp_path, 8)
    process = start_shout(tmp_path, processes, 0.2)
    wait_for(lambda: markers(tmp_path) >= 2)
    family = descendants(process.pid)
    process.kill()
    process.communicate()
    wait_for(lambda: not any(map(alive, family)))
    before = tree(tmp_path / "out")
    wanted = {f"AA/{shard.output.name}": shard.inputs[0].read_bytes().upper() for shard in shards}
    wanted |= {f"{name}.index": b"0 5\n" for name in wanted}
    assert 0 < len(before) < 16
    assert before.items() <= wanted.items()
    assert not (tmp_path / "out/manifest.json").exists()
    process = start_shout(tmp_path, processes, 0.0)
    printed, _ = process.communicate()
    assert process.returncode == 0
    assert "shards were done before" in printed
    assert tree(tmp_path / "out") == wanted


def test_a_killed_worker_is_named_and_its_shard_is_absent(tmp_path):
    make_inputs(tmp_path)
    (tmp_path / "in/02").write_text("DIE")
    process = start_shout(tmp_path, 2, 0.05)
    _, printed = process.communicate()
    assert process.returncode == 3
    assert "AA/02" in printed and "a worker process was killed" in printed
    assert not {"AA/02", "manifest.json"} & tree(tmp_path / "out").keys()


def test_ctrl_c_stops_the_workers_and_exits_130(tmp_path):
    make_inputs(tmp_path, 50)  # ten seconds of work: on a busy machine the signal may come late
    process = start_shout(tmp_path, 2, 0.4)
    wait_for(lambda: markers(tmp_path) >= 1)
    family = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate()
    assert process.returncode == 130
    assert printed.startswith("shout: interrupted,") and "Traceback" not in printed
    wait_for(lambda: not any(map(alive, family)))


def test_a_file_system_without_locks_is_reported_and_used(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert run(make_inputs(tmp_path), tmp_path / "out")["counts"]["documents"] == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path / 'out/.done/lock'} cannot be locked" in line


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    with progress.Progress("shout", 40_000_000, 10_000_000) as bar:
        bar.started -= 10.0
        bar.advance(20_000_000)
    assert capsys.readouterr().err == "shout: 30.0 of 40.0 MB (75 %), 2.0 MB/s\n"
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 10.0)
    for earlier, lines in ((9.0, 0), (10.0, 1), (10.0, 1)):
        bar.printed = time.monotonic() - earlier
        bar.advance(1)
        bar.advance(1)
        assert len(capsys.readouterr().err.splitlines()) == lines
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "110")
    with progress.Progress("shout", 4_000_000) as bar:
        bar.started -= 100.0
        bar.advance(1_000_000)
        bar.live.refresh()
        assert "shout: 1.0 of 4.0 MB (25 %), " in sys.stderr.getvalue()
        assert "5 min 0" in sys.stderr.getvalue()
    monkeypatch.setenv("TERM", "dumb")
    assert not progress.Progress("shout", 4_000_000).shown


def test_the_plan_counts_what_is_left_and_rejects_a_full_disk(tmp_path, capsys, monkeypatch):
    free = 1_061
    monkeypatch.setattr(runner, "free_bytes", lambda _: free)
    shards, out = make_inputs(tmp_path, 3), tmp_path / "out"  # 350 bytes and an index of 4 each
    problem = r"write about 1\.1 kB, but only 1\.1 kB are free there; make"
    with pytest.raises(DataError, match=problem):
        run(shards, out, expected_bytes=1_062)
    assert tree(out) == {}
    run(shards[:2], out)
    free = 353
    with pytest.raises(DataError, match=r"about 354 bytes"):
        run(shards, out, expected_bytes=1_062)
    free = 354
    capsys.readouterr()
    run(shards, out, expected_bytes=1_062)
    line = capsys.readouterr().out.splitlines()[0]
    assert "3 shards, about 354 bytes to write (708 bytes are there), 354 bytes free in" in line
    free = 0  # nothing is left to write, however wrong the estimate was
    run(shards, out, expected_bytes=9_000)
    assert "3 shards, nothing to write (1.1 kB are there)" in capsys.readouterr().out


def test_the_files_of_a_shard_are_forced_to_the_disk(tmp_path, monkeypatch):
    forced: list[Path] = []
    monkeypatch.setattr(files, "fsync_paths", forced.extend)
    make_shard(make_inputs(tmp_path, 1)[0], tmp_path / "work", shout)
    folder = tmp_path / "work/out"
    assert sorted(forced) == [folder / "00", folder / "00.index"]


def test_checksums_are_crc32c_and_only_files_written_since_are_read_again(tmp_path, monkeypatch):
    def write(name, text, seconds):
        (tmp_path / name).write_text(text)
        os.utime(tmp_path / name, ns=(seconds * 10**9, seconds * 10**9))

    for name, text in (("a", "123456789"), ("b", "b" * 100), ("c", "c" * 100)):
        write(name, text, 1)
    first = manifest.checksums(tmp_path, "abc", {})
    assert first[0]["crc32c"] == "e3069283"  # the check value of crc32c's definition
    write("corpus.json", json.dumps({"files": first}), 2)
    write("b", "b" * 100, 2)  # in doubt it counts as newer
    write("c", "c" * 101, 1)
    known = manifest.known_checksums(tmp_path / "corpus.json")
    assert known == {"a": first[0]["crc32c"]}
    monkeypatch.setattr("bert_cli.files.file_crc32c", lambda path: f"of {path.name}")
    again = manifest.checksums(tmp_path, "abc", known)
    assert [entry["crc32c"] for entry in again] == [first[0]["crc32c"], "of b", "of c"]
    write("corpus.json", '{"files": [{"name": "a"}]}', 2)
    assert manifest.known_checksums(tmp_path / "corpus.json") == {}

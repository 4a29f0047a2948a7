"""Figures to files and lines."""

import errno
import json
import shutil
import subprocess
import sys

import pytest

from bert_cli.train import best, report

FIGURES = {
    "mlm_loss": 7.5,
    "nsp_loss": 0.7,
    "mlm_accuracy": 0.1,
    "nsp_accuracy": 0.5,
    "learning_rate": 1e-4,
    "gradient_norm": 2.0,
    "weight_norm": 80.0,
    "loss_scale": 1.0,
    "skipped": 0,
    "examples_per_second": 123.4,
    "tokens_per_second": 9876.0,
    "seconds_left": 3700.0,
}


def steps_in(path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_metrics_have_one_object_a_step(tmp_path):
    tell = report.jsonl(tmp_path / "metrics.jsonl", 0)
    tell(1, {"mlm_loss": 7.0})
    tell(2, {"mlm_loss": 6.5, "learning_rate": 0.1})
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "mlm_loss": 7.0},
        {"step": 2, "mlm_loss": 6.5, "learning_rate": 0.1},
    ]


def test_a_resumed_run_drops_the_steps_it_will_do_again_and_a_line_cut_in_half(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tell = report.jsonl(path, 0)
    for step in (1, 2, 3, 4):
        tell(step, {"mlm_loss": 1.0})
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"step": 5, "mlm_l')
    report.jsonl(path, 2)(3, {"mlm_loss": 2.0})
    assert steps_in(path) == [1, 2, 3]


def test_a_full_disk_is_named_and_leaves_metrics_and_best_score_as_they_were(small_disk):
    folder = small_disk(16384)
    rows = "".join(f'{{"step": {step}, "mlm_loss": 1.0}}\n' for step in range(300))
    (folder / "metrics.jsonl").write_text(rows)
    best.note_best(folder, 1, "f1", 0.5)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(OSError, match=r"No space left on device, .* are missing") as raised:
        report.jsonl(folder / "metrics.jsonl", 299)
    assert raised.value.filename == str(folder / "metrics.jsonl")
    (folder / "rest").write_bytes(bytes(shutil.disk_usage(folder).free))
    with pytest.raises(OSError, match=r"No space left on device, .* are missing") as raised:
        best.note_best(folder, 2, "f1", 0.6)
    assert raised.value.filename == str(folder / "best.json")
    (folder / "rest").unlink()
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_loss_that_is_not_finite_is_null_because_json_has_no_nan(tmp_path):
    path = tmp_path / "metrics.jsonl"
    report.jsonl(path, 0)(1, {"mlm_loss": float("nan"), "nsp_loss": float("inf")})
    assert json.loads(path.read_text()) == {"step": 1, "mlm_loss": None, "nsp_loss": None}


def test_a_line_without_a_time_left_says_none():
    known = {name: value for name, value in FIGURES.items() if name != "seconds_left"}
    assert " left" in report.line(12, 1000, FIGURES) and " left" not in report.line(12, 1000, known)


def test_a_line_shows_every_figure_a_person_looks_for():
    text = report.line(12, 1000, FIGURES)
    for part in ("step   12/1000", "mlm 7.5000 (10.0 %)", "nsp 0.7000 (50.0 %)", "lr 1.00e-04"):
        assert part in text
    assert "123.4 examples/s" in text
    assert "9,876 tokens/s" in text
    assert "1 h 01 min left" in text
    assert "skipped" not in text
    assert "3 skipped" in report.line(12, 1000, {**FIGURES, "skipped": 3})


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO])
def test_a_run_goes_on_when_its_terminal_or_reader_is_gone(number):
    code = (
        "import sys\nfrom bert_cli.train.report import say\n"
        "class Gone:\n"
        "    fileno = staticmethod(lambda: 1)\n"
        "    flush = staticmethod(lambda: None)\n"
        f"    def write(self, text): raise OSError({number}, 'gone')\n"
        "sys.stdout = Gone()\nsay('a line')\nprint('alive', file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "alive\n"


def test_durations_read_as_people_say_them():
    told = [report.duration(seconds) for seconds in (41.6, 200, 18_120, 273_600)]
    assert told == ["42 s", "3 min 20 s", "5 h 02 min", "3 d 4 h"]


def test_the_pace_leaves_out_the_first_step_and_what_is_done_between_steps():
    now = 0.0
    pace = report.Pace(10, clock=lambda: now)
    now = 30.0  # tracing
    pace.after_step(1, 64.0, 640.0)
    pace.restart()
    for step in (2, 3):
        now += 2.0
        figures = pace.after_step(step, 64.0, 640.0)
        now += 100.0  # a checkpoint
        pace.restart()
    assert figures["examples_per_second"] == 32.0
    assert figures["tokens_per_second"] == 320.0
    assert figures["seconds_left"] == 14.0

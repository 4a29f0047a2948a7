"""`bert runs`: a list of the runs below a folder."""

import json
import os
import subprocess
import sys
import time

import pytest

from bert_cli.cli import main


@pytest.fixture
def folder(tmp_path, write_run):
    runs = tmp_path / "runs"
    write_run(runs / "base", 8, total=10, saved=(8,))
    mrpc = write_run(runs / "mrpc" / "seed_1984", 10, saved=(10,), glue_task="mrpc")
    settings = json.loads((mrpc / "settings.json").read_text())
    del settings["max_predictions_per_seq"]
    (mrpc / "settings.json").write_text(json.dumps(settings))
    (mrpc / "scores.json").write_text('{"accuracy": 0.8, "f1": 0.86}')
    return runs


def test_each_run_is_a_line_with_its_step_loss_state_and_age(folder, capsys):
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - 20_000,) * 2)
    assert main(["runs", str(folder)]) == 0
    head, base, mrpc = capsys.readouterr().out.splitlines()
    assert head.split() == [
        "run",
        "command",
        "step",
        "of",
        "loss",
        "held",
        "out",
        "state",
        "last",
        "written",
    ]
    row = [
        str(folder / "base"),
        *["pretrain", "8", "10", "mlm", "4.0000", "stopped", "5", "h", "ago"],
    ]
    assert base.split() == row
    assert "glue mrpc" in mrpc and "accuracy 0.8000  f1 0.8600" in mrpc and "done" in mrpc


def test_the_list_is_json_on_standard_output_or_in_a_file(folder, tmp_path, capsys):
    assert main(["runs", str(folder), "--json", "-"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert main(["runs", str(folder), "--json", str(tmp_path / "new" / "runs.json")]) == 0
    assert json.loads((tmp_path / "new" / "runs.json").read_text()) == printed
    assert capsys.readouterr().out.startswith("run ")
    assert printed[0].pop("written").startswith("20")
    assert printed[0] == {
        "run": str(folder / "base"),
        "what": "pretrain",
        "step": 8,
        "total_steps": 10,
        "losses": {"mlm": 4.0},
        "held_out": {},
        "state": "stopped",
    }


def test_the_last_evaluation_is_shown_also_after_later_steps(tmp_path, write_run, capsys):
    run = write_run(tmp_path / "run", 8, saved=(8,))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[2]["validation_mlm_loss"] = 7.25
    lines[5]["validation_mlm_loss"] = 6.75
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert main(["runs", str(tmp_path), "--json", "-"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["step"] == 8 and row["held_out"] == {"mlm_loss": 6.75}


def test_the_current_folder_is_the_default_and_each_run_is_listed_once(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main(["runs"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("base ")
    assert main(["runs", str(folder / "base"), str(folder)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_run_that_cannot_be_read_does_not_hide_the_others(folder, capsys):
    (folder / "base" / "settings.json").write_text("{")
    assert main(["runs", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "settings.json: Invalid JSON" in out and "glue mrpc" in out


def test_many_losses_are_shortened_and_non_finite_ones_named(tmp_path, write_run, capsys):
    run = write_run(tmp_path / "run", 1)
    metrics = {"step": 2, "mlm_loss": None, "nsp_loss": 1.0, "a_loss": 1.0, "b_loss": 1.0}
    metrics |= {"validation_mlm_loss": 2.0, "validation_mlm_accuracy": 0.5}
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(metrics) + "\n")
    assert main(["runs", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "mlm not finite  nsp 1.0000  a 1.0000  ..." in out
    assert "  mlm 2.0000  " in out and "0.5" not in out


def test_folders_without_runs_and_mistakes_are_messages(tmp_path, write_run, capsys):
    assert main(["runs", str(tmp_path)]) == 0
    assert (
        "no runs; a run is a folder that was given as --save-ckpt-path" in capsys.readouterr().out
    )
    assert main(["runs", str(tmp_path / "absent")]) == 3
    assert "is no folder; give one that contains runs" in capsys.readouterr().err
    write_run(tmp_path / "run", 1)
    assert main(["runs", str(tmp_path), "--json", "/proc/nowhere/runs.json"]) == 3
    assert "json (/proc/nowhere/runs.json): cannot be written" in capsys.readouterr().err


def test_the_list_loads_no_heavy_package(folder):
    code = (
        "import sys\nfrom bert_cli.cli import main\n"
        f"main(['runs', {str(folder)!r}])\n"
        "print(sorted(set(sys.modules) & {'tensorflow', 'keras', 'torch', 'transformers', 'matplotlib'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"

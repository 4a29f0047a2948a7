"""`bert runs`: the runs below a folder, a line each."""

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


def test_each_run_is_a_line_with_its_step_loss_and_state(folder, capsys):
    assert main(["runs", str(folder)]) == 0
    head, base, mrpc = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "what", "step", "of", "loss", "held", "out", "state", "written"]
    assert base.split()[:7] == [
        str(folder / "base"),
        "pretrain",
        "8",
        "10",
        "mlm",
        "4.0000",
        "stopped",
    ]
    assert "glue mrpc" in mrpc and "accuracy 0.8000  f1 0.8600" in mrpc and "done" in mrpc


def test_the_last_evaluation_is_shown_though_steps_came_after_it(tmp_path, write_run, capsys):
    run = write_run(tmp_path / "run", 8, saved=(8,))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[2]["validation_mlm_loss"] = 7.25
    lines[5]["validation_mlm_loss"] = 6.75
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert main(["runs", str(tmp_path), "--json", "-"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told["step"] == 8 and told["held_out"] == {"mlm_loss": 6.75}


def test_when_a_run_was_last_written_is_told_shortly(folder, capsys):
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - 20_000,) * 2)
    assert main(["runs", str(folder)]) == 0
    assert [line.split("  ")[-1].strip() for line in capsys.readouterr().out.splitlines()[1:]] == [
        "5 h ago",
        "5 h ago",
    ]


def test_the_list_is_json_on_standard_output_or_in_a_file(folder, tmp_path, capsys):
    assert main(["runs", str(folder), "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert main(["runs", str(folder), "--json", str(tmp_path / "new" / "runs.json")]) == 0
    assert json.loads((tmp_path / "new" / "runs.json").read_text()) == told
    assert capsys.readouterr().out.startswith("run ")
    base = told[0]
    assert base.pop("written").startswith("20")
    assert base == {
        "run": str(folder / "base"),
        "what": "pretrain",
        "step": 8,
        "total_steps": 10,
        "losses": {"mlm": 4.0},
        "held_out": {},
        "state": "stopped",
    }


def test_the_current_folder_is_looked_at_by_default(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main(["runs"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("base ")


def test_several_folders_are_looked_at_and_each_run_is_told_once(folder, capsys):
    assert main(["runs", str(folder / "base"), str(folder)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_run_that_cannot_be_read_hides_no_other(folder, capsys):
    (folder / "base" / "settings.json").write_text("{")
    assert main(["runs", str(folder)]) == 0
    told = capsys.readouterr().out
    assert "settings.json: Invalid JSON" in told and "glue mrpc" in told


def test_losses_that_are_not_finite_or_many_are_said_shortly(tmp_path, write_run, capsys):
    run = write_run(tmp_path / "run", 1)
    figures = {"step": 2, "mlm_loss": None, "nsp_loss": 1.0, "a_loss": 1.0, "b_loss": 1.0}
    figures |= {"validation_mlm_loss": 2.0, "validation_mlm_accuracy": 0.5}
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(figures) + "\n")
    assert main(["runs", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "mlm not finite  nsp 1.0000  a 1.0000  ..." in told
    assert "  mlm 2.0000  " in told and "0.5" not in told


def test_a_folder_without_runs_says_what_a_run_is(tmp_path, capsys):
    assert main(["runs", str(tmp_path)]) == 0
    assert "no runs here; a run is a folder that --save-ckpt-path named" in capsys.readouterr().out


def test_a_folder_that_is_not_there_is_refused(tmp_path, capsys):
    assert main(["runs", str(tmp_path / "absent")]) == 3
    assert "is no folder; give one that runs lie in" in capsys.readouterr().err


def test_a_list_that_cannot_be_written_is_a_message(folder, capsys):
    assert main(["runs", str(folder), "--json", "/proc/nowhere/runs.json"]) == 3
    assert "json (/proc/nowhere/runs.json): cannot be written" in capsys.readouterr().err


def test_listing_loads_nothing_heavy(folder):
    code = (
        "import sys\nfrom bert_cli.cli import main\n"
        f"main(['runs', {str(folder)!r}])\n"
        "print(sorted(set(sys.modules) & {'tensorflow', 'keras', 'torch', 'transformers', 'numpy', 'matplotlib'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"

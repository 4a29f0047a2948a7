"""`scripts/speedrun`: its recipes, its text and its table."""

import json
import subprocess
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.command_lines import ROOT, script
from support.settings import merged

from bert_cli.config.pretrain import PretrainSettings

speedrun = script("speedrun")
ROWS = json.loads((ROOT / "scripts" / "speedrun.json").read_text())


@pytest.mark.parametrize("name", ROWS)
def test_every_recipe_is_a_complete_order_of_a_run(name, tmp_path, monkeypatch):
    monkeypatch.setattr(speedrun, "records", lambda *sizes: tmp_path / "records")
    recipe = speedrun.recipe_of(name)
    settings = speedrun.order_of(speedrun.settings_of(tmp_path, recipe), 100, 1e-3, 0)
    order = PretrainSettings.model_validate(settings)
    assert order.max_seq_length == (128 if name.startswith("init") else 32)
    measured = PretrainSettings.model_validate(speedrun.at_full_size(settings))
    assert measured.global_batch.start_fraction is None
    assert (order.bert_config.architecture == "modernbert") == (name != "init-before")
    assert order.max_predictions_per_seq >= order.masking.probability * order.max_seq_length
    assert order.max_predictions_per_seq <= speedrun.most_masked(order.max_seq_length)


def test_a_recipe_changes_what_it_is_like_all_the_way_to_base():
    expected = ROWS["base"]["settings"]
    for name in ("small-batches", "wide-start", "two-layers", "masks-30"):
        expected = merged(expected, ROWS[name]["settings"])
    assert speedrun.recipe_of("masks-30")["settings"] == expected
    assert expected["bert_config"]["num_hidden_layers"] == 2
    assert expected["bert_config"]["hidden_size"] == 256
    assert ROWS["base"]["settings"]["bert_config"]["num_hidden_layers"] == 6  # not changed by it


def test_another_text_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "wiki_00").write_text("Other articles.")
    with pytest.raises(SystemExit, match=r"other text \(SHA-256 .*scores would not compare"):
        speedrun.prepare(tmp_path / "text", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_minutes_of_a_start_that_failed_count(tmp_path):
    work = "import time\nwhile time.process_time() < 0.3: pass\nraise SystemExit({})"
    path = tmp_path / "minutes.json"
    taken = []
    for code in (1, 0):
        with suppress(subprocess.CalledProcessError), speedrun.adding_minutes(path):
            speedrun.on_one_core("-c", work.format(code))
        taken.append(json.loads(path.read_text()) * 60)
    assert 0.3 <= taken[0] <= taken[1] - 0.3


def test_the_table_ranks_recipes_by_the_mean_of_their_seeds(tmp_path):
    rows = [("slow", 0, 2.5, 1.0), ("fast", 0, 2.2, 2.0), ("fast", 1, 2.4, 3.0)]
    for name, seed, bits, minutes in rows:
        folder = tmp_path / "runs" / f"{name}_{seed}"
        folder.mkdir(parents=True)
        row = {"recipe": name, "rate": 1e-3, "seed": seed, "seconds": 110.0}
        row |= {"steps": 9, "minutes": minutes, "bits_per_byte": bits}
        (folder / "result.json").write_text(json.dumps(row))
    assert [*speedrun.table(tmp_path)][2:] == [
        "| fast | 110 | 0.001 | 2 | 2.300 (2.200 to 2.400) | 2.5 |",
        "| slow | 110 | 0.001 | 1 | 2.500 | 1.0 |",
    ]


# --- its work, with stand-ins of the commands and of the clock


@pytest.fixture
def ran(monkeypatch):
    """The name and the words of each command; what the script reads of its output is there."""
    commands = []

    def run(*words):
        name, *words = map(str, words[1:] if words[1] == "steps" else words[2:])
        commands.append((name, words))
        output = Path(words[:2][-1])
        outputs = {
            "vocab": (output / "manifest.json", "{}"),
            "index": (output / "corpus.json", "{}"),
            "steps": (output, "12"),
            "evaluate": (Path(words[-1]), '{"scores": {"bits_per_byte": 2.5}}'),
        }
        if name in outputs:
            path, text = outputs[name]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    monkeypatch.setattr(speedrun, "on_one_core", run)
    return commands


def test_the_held_out_files_are_not_trained_on(tmp_path, ran, monkeypatch):
    (tmp_path / "text").mkdir()
    for number in range(9):
        (tmp_path / "text" / f"wiki_{number}").write_text(str(number))
    monkeypatch.setattr(speedrun, "TEXT_SHA256", sha256(b"012345678").hexdigest())
    speedrun.prepare(tmp_path / "text", tmp_path)
    for part, expected in (("train", "012345"), ("held_out", "678")):
        folder = tmp_path / "text" / part
        assert "".join(path.read_text() for path in sorted(folder.iterdir())) == expected
        assert ("preprocess", [str(folder), str(tmp_path / "sentences" / part)]) in ran


def test_a_recipe_has_as_many_steps_as_fit_into_the_time_of_those_of_base(monkeypatch):
    now = [0.0]

    def opened(settings, stack):
        def step(batch):
            now[0] += settings["cost"]

        return SimpleNamespace(stream=range(30)), step

    monkeypatch.setattr(speedrun, "open_run", opened)
    monkeypatch.setattr(speedrun.time, "process_time", lambda: now[0])
    base, *recipes = ({"cost": cost, "global_batch": {}} for cost in (3.0, 3.0, 6.0, 1.5))
    assert [speedrun.steps_in(one, base, 220.0) for one in recipes] == [1100, 550, 2200]


def test_a_recipe_is_measured_for_all_its_runs_and_each_is_trained_and_scored_once(
    tmp_path, ran, monkeypatch
):
    for name, seed, expected in (
        ("masks-30", 0, ["steps", "pretrain", "evaluate"]),
        ("masks-30", 1, ["pretrain", "evaluate"]),
        ("masks-30", 1, []),
        ("mean-of-6", 0, ["steps", "pretrain", "average", "evaluate"]),
    ):
        ran.clear()
        speedrun.train(tmp_path, name, 1e-3, seed, 220.0)
        work = [one for one in ran if one[0] not in ("vocab", "tokenize", "index")]
        assert [command for command, _ in work] == expected
        if expected:
            run = tmp_path / f"runs/{name}_220_0.001_{seed}"
            model, _, records, *_ = work[-1][1]
            assert model == str(run / ("mean" if "average" in expected else "run"))
            assert "/held_out_32_8192_" in records
            order = json.loads((run / "config.json").read_text())
            assert "/train_32_8192_" in order["dataset_dir"] and order["seed"] == seed
            assert json.loads((run / "result.json").read_text())["bits_per_byte"] == 2.5
    changed = speedrun.recipe_of("masks-30") | {"pieces": 99}
    monkeypatch.setitem(speedrun.RECIPES, "masks-30", changed)
    with pytest.raises(SystemExit, match="the recipe has changed since this run began"):
        speedrun.train(tmp_path, "masks-30", 1e-3, 0, 220.0)
    ran.clear()
    speedrun.train(tmp_path, "masks-30", 1e-3, 2, 220.0)
    assert "steps" in [name for name, _ in ran]


def test_a_run_starts_from_first_weights_of_its_seed_of_which_some_are_zero(tmp_path, monkeypatch):
    names = ["layers.0.attn.Wo.weight", "layers.0.mlp.Wi.weight", "layers.0.mlp.Wo.weight"]
    (tmp_path / "config.json").write_text(json.dumps({"seed": 3, "total_num_train_samples": 64}))
    orders = []

    def pretrain(*words):
        orders.append(json.loads(Path(words[2]).read_text()))
        saved = Path(words[4]) / "step_00000001"
        saved.mkdir(parents=True)
        save_file({name: np.ones(2, np.float32) for name in names}, saved / "model.safetensors")
        (saved / "state.json").write_text("{}")

    monkeypatch.setattr(speedrun, "bert", pretrain)
    for _ in range(2):
        flag, folder = speedrun.start_with_zeros(tmp_path, ROWS["hold-40-zero"]["zeros"])
    assert flag == "--pretrained-ckpt-path"
    values = {name: value.max() for name, value in load_file(folder / "model.safetensors").items()}
    assert values == dict(zip(names, (0, 1, 0), strict=True))
    assert not (folder / "state.json").exists()  # a checksum of other weights
    rate = {"learning_rate": {"max_learning_rate": 1e-7}}
    assert orders == [{"seed": 3, "total_num_train_samples": 1, "optimizer_opts": rate}]

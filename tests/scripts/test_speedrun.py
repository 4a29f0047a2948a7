"""`scripts/speedrun`: its recipes, its text and its table."""

import json
import subprocess
from contextlib import suppress

import pytest
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

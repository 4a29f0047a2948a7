"""The card of a run's checkpoint: its rows, its code, and what an export makes of it."""

import re

import tensorflow  # noqa: F401 (before conftest.py cuts the CPU into devices)
import yaml

from bert_cli.cli import main
from bert_cli.train.card import CARD, model_card, training_section


def test_a_checkpoints_card_describes_its_training_and_names_no_folder(pretrained):
    text = (pretrained / "run/step_00000006" / CARD).read_text()
    assert str(pretrained) not in text
    assert (pretrained / "run/step_00000005" / CARD).read_text() != text
    front = yaml.safe_load(text.split("---\n")[1])
    entries = {"library_name": "transformers", "pipeline_tag": "fill-mask"}
    assert front == {**entries, "tags": ["bert"]}
    rows = ("data | records, ", "starts from | model", "steps | 6 of 6", "command | `bert pret")
    assert all(f"| {row}" in text for row in rows)


def test_the_code_of_a_checkpoints_card_runs_and_its_numbers_are_the_models(
    pretrained, monkeypatch, capsys
):
    import transformers

    path = pretrained / "run/step_00000006"
    text = (path / CARD).read_text()
    monkeypatch.chdir(path)
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], {})
    assert "'token_str'" in capsys.readouterr().out
    model = transformers.BertForPreTraining.from_pretrained(path)
    number = sum(value.numel() for value in model.parameters())
    assert f"A BertForPreTraining for fill-mask with {number:,} parameters: 2 layers" in text


def test_an_export_keeps_the_training_and_adds_the_scores(pretrained, tmp_path):
    for source, out in (("run/step_00000006", tmp_path / "first"), ("first", tmp_path / "second")):
        folder = pretrained / source if source.startswith("run") else tmp_path / source
        assert main(["export", str(folder), str(out), "--format", "hf"]) == 0
    first, second = ((tmp_path / name / CARD).read_text() for name in ("first", "second"))
    trained = (pretrained / "run/step_00000006" / CARD).read_text().partition("## Training")[2]
    assert trained.strip() in first and re.search(r"\| mlm_loss \| \d\.\d{4} \|", first)
    assert first == second and first.count("Written by `bert export") == 1


def test_a_card_names_every_corpus_and_the_labels():
    mixture = [{"path": "/data/a/128", "weight": 1.0}, {"path": "/data/b", "weight": 2.0}]
    state = {"step": 3, "fixed": {}, "epoch_size": 1200, "settings": {"dataset_dir": mixture}}
    assert "| data | 128, b, 1,200 examples |" in training_section(state)
    synthetic = {"dataset_dir": "/x/a", "generated_dataset": True}
    assert "| data | synthetic examples |" in training_section({**state, "settings": synthetic})
    distillation = {"teacher": "runs/large", "unlabelled_file": "more.tsv"}
    student = {**state, "settings": {"train_file": "a.tsv", "distillation": distillation}}
    few = {**state, "settings": {"train_file": "a.tsv", "few": True}}
    assert "| data | a.tsv, 1,200 pairs of its texts |" in training_section(few)
    section = training_section(student)
    assert "| teacher | large |" in section and "| data | a.tsv, more.tsv, " in section
    config = {"architectures": ["BertForTokenClassification"], "id2label": {"0": "O", "1": "B-X"}}
    assert "Labels: `O`, `B-X`" in model_card(config, 7, [], is_embedding=False)
    config = {"architectures": ["BertModel"]}
    text = model_card(config, 7, [], is_embedding=True)
    assert "library_name: sentence-transformers\npipeline_tag: sentence-similarity" in text

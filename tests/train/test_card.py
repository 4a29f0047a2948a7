"""The card of a run's checkpoint: its rows, its code, and what an export makes of it."""

import re

import tensorflow  # noqa: F401 (before conftest.py cuts the CPU into devices)
import yaml

from bert_cli import __version__
from bert_cli.cli import main
from bert_cli.train.card import CARD, decision_section, model_card, training_section, without


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


TRAINED = """## Training

| | |
|---|---|
| command | `bert embed` of bert-cli {version}, settings in state.json |
| data | 128, b, more.tsv, 1,200 pairs of its texts |
| starts from | base |
| teacher | large |
| steps | 3,000 of 4,000 |
| examples of a step | 64 |
| precision | float32 |
| seed | 0 |"""


def test_the_training_section_has_a_row_for_what_is_known():
    mixture = [{"path": "/data/a/128", "weight": 1.0}, {"path": "/data/b", "weight": 2.0}]
    distillation = {"teacher": "runs/large", "unlabelled_file": ["more.tsv", "/x/b"]}
    about = {"command": "embed", "few": True, "pretrained_ckpt_path": "runs/base/step_00000009"}
    about |= {"dataset_dir": mixture, "distillation": distillation}
    about |= {"max_seq_length": None, "precision": "float32", "seed": 0}
    state = {"step": 3000, "fixed": {"total_steps": 4000, "examples_per_step": 64}}
    section = training_section({**state, "epoch_size": 1200, "settings": about})
    assert section == TRAINED.format(version=__version__)
    synthetic = {"dataset_dir": "/x/a", "generated_dataset": True, "pretrained_ckpt_path": "x/base"}
    section = training_section({**state, "epoch_size": 1200, "settings": synthetic})
    assert "| data | synthetic examples |\n| starts from | base |" in section
    section = training_section({**state, "settings": {"train_file": "a.tsv"}})
    assert "`bert ?` of" in section and "| data | a.tsv |\n| steps |" in section


def test_a_section_on_answers_says_what_was_chosen():
    heading, *_, row, _, about = decision_section({"temperature": 1.25004}).splitlines()
    assert (heading, row) == ("## Calibration", "| temperature | 1.2500 |")
    assert about.startswith("Divide the logits by it before the softmax;")
    heading, *_, row, _, about = decision_section({"thresholds": {"a": 0.1, "b": 0.5}}).splitlines()
    assert (heading, row) == ("## Thresholds", "| b | 0.5000 |")
    assert about.startswith("A text has a label if the sigmoid of its output is above")
    assert decision_section({"thresholds": {}, "text_column": ["a"]}) == ""
    card = "# A\n\n## Use\nx\n\n## Thresholds\n\nold\n\n## Training\ny\n"
    assert without(card, "## Thresholds", "## B") == "# A\n\n## Use\nx\n\n## Training\ny\n"


def test_the_front_and_the_code_of_a_card_follow_the_model_and_its_runtime():
    several = {"problem_type": "multi_label_classification"}
    labels = {"id2label": {"0": "O", "1": "B-X"}}
    for name, more, options, shown in (
        ("BertForTokenClassification", labels, {}, "Labels: `O`, `B-X`"),
        ("BertModel", {}, {}, "library_name: transformers\npipeline_tag: feature-extraction"),
        ("BertModel", {}, {"is_embedding": True}, "library_name: sentence-transformers"),
        ("BertModel", {}, {"is_embedding": True}, "pipeline_tag: sentence-similarity"),
        ("BertModel", {}, {"is_embedding": True, "runtime": "onnx"}, "library_name: onnx\n"),
        ("BertForMaskedLM", {}, {"license_id": "mit"}, "license: mit\nlibrary_name: transformers"),
        ("BertForMaskedLM", {}, {}, 'run("A [MASK] in a text.")'),
        ("BertForSequenceClassification", {}, {}, 'model=".")\nprint(run("A text."))'),
        ("BertForSequenceClassification", several, {}, 'model=".", top_k=None)'),
        ("GroupBertForMaskedLM", {"model_type": "groupbert"}, {}, 'model=".", trust_remote_code=True)'),
        ("BertForMeanClassification", {}, {}, 'model=".", trust_remote_code=True)'),
    ):  # fmt: skip
        config = {"architectures": [name], **more}
        text = model_card(
            config, 7_000, ["## A\n", "", "## B"], **{"is_embedding": False, **options}
        )
        assert shown in text and "with 7,000 parameters: 12 layers of hidden size 768" in text
        assert text.endswith("```\n\n## A\n\n## B\n")

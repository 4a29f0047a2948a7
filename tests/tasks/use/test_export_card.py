"""The card of an export, whose code is run."""

import os
import re
import subprocess
import sys

import pytest
import yaml
from support.hf_models import need

from bert_cli.cli import main


def parts_of(folder):
    """Return the front matter, the text and the code of a folder's card."""
    text = (folder / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    return yaml.safe_load(front), body, re.search(r"```python\n(.*?)```", body, re.DOTALL)[1]


def run_code(code, folder):
    """Return what the code of a card prints, run in its folder as a person would."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    words = [sys.executable, "-c", code]
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


CARDS = [
    ("masked", "hf", "fill-mask", "transformers", r"'sequence'"),
    ("text", "hf", "text-classification", "transformers", r"'label': 'LABEL_\d'"),
    ("question", "hf", "question-answering", "transformers", r""),
    ("text", "tflite", "text-classification", "tflite", r"'logits': array"),
    ("group", "hf", "fill-mask", "transformers", r"'sequence'"),
    ("token", "hf", "token-classification", "transformers", r"'entity'"),
    ("bare", "hf", "feature-extraction", "transformers", r"^\[\[\["),
    ("token", "onnx", "token-classification", "onnx", r"array"),
    ("several", "hf", "text-classification", "transformers", r"(LABEL_\d.*){3}"),
    ("masked", "saved-model", "fill-mask", "saved-model", r"'logits'"),
    ("modern", "onnx", "text-classification", "onnx", r"array"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form", "task", "library", "output"), CARDS)
def test_the_code_of_an_exports_card_runs(
    name, form, task, library, output, models, tmp_path, capsys, monkeypatch
):
    if form == "onnx":
        need("torch", "onnx", "onnxscript", "onnxruntime")
    out = tmp_path / "out"
    words = [str(models[name]), str(out), "--format", form, "--license", "apache-2.0"]
    assert main(["export", *words]) == 0
    assert (f"run hf upload OWNER/NAME {out}\n" in capsys.readouterr().out) == (form == "hf")
    front, body, code = parts_of(out)
    expected = {"license": "apache-2.0", "library_name": library, "pipeline_tag": task}
    kind = {"group": "groupbert", "modern": "modernbert"}.get(name, "bert")
    assert front == {**expected, "tags": [kind]}
    assert f"`bert export --format {form}`" in body and str(tmp_path) not in body
    if (
        library == "transformers"
    ):  # which this process has imported, as `bert export` compares with it
        monkeypatch.chdir(out)
        exec(code, {})
        assert re.search(output, capsys.readouterr().out)
    else:
        assert re.search(output, run_code(code, out))

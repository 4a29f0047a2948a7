"""The card of an export, whose code is run, and what the client of the Hugging Face hub is asked to upload."""

import os
import re
import subprocess
import sys
from unittest.mock import create_autospec

import httpx
import huggingface_hub
import pytest
import yaml
from huggingface_hub.errors import HfHubHTTPError
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
    ("masked", "saved-model", "fill-mask", "saved-model", r"'logits'"),
]
DAILY = 2


@pytest.mark.parametrize(
    ("name", "form", "task", "library", "output"),
    [*CARDS[:DAILY], *(pytest.param(*row, marks=pytest.mark.slow) for row in CARDS[DAILY:])],
)
def test_the_code_of_an_exports_card_runs(name, form, task, library, output, models, tmp_path):
    if form == "onnx":
        need("torch", "onnx", "onnxscript", "onnxruntime")
    out = tmp_path / "out"
    words = [str(models[name]), str(out), "--format", form, "--license", "apache-2.0"]
    assert main(["export", *words]) == 0
    front, body, code = parts_of(out)
    expected = {"license": "apache-2.0", "library_name": library, "pipeline_tag": task}
    kind = "groupbert" if name == "group" else "bert"
    assert front == {**expected, "tags": [kind]}
    assert f"`bert export --format {form}`" in body and str(tmp_path) not in body
    assert re.search(output, run_code(code, out))


# --- the upload


@pytest.fixture
def hub(monkeypatch):
    """The hub's client with its signatures and without its network, and a token."""
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")
    hub = create_autospec(huggingface_hub.HfApi, instance=True)
    hub.endpoint = "https://hub"
    hub.create_repo.return_value = "https://hub/me/mine"
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    return hub


def push(model, out):
    return main(["export", str(model), str(out), "--format", "hf", "--push", "me/mine"])


def test_an_export_is_uploaded_into_a_repository_that_may_exist(hub, models, tmp_path, capsys):
    out, uploaded = tmp_path / "out", {}

    def upload(*, repo_id, folder_path, commit_message):
        uploaded.update({path.name: path.read_bytes() for path in folder_path.iterdir()})
        assert repo_id == "me/mine"

    hub.upload_folder.side_effect = upload
    assert push(models["masked"], out) == 0
    hub.create_repo.assert_called_once_with("me/mine", exist_ok=True)
    assert "export: uploaded to https://hub/me/mine" in capsys.readouterr().out
    assert uploaded == {path.name: path.read_bytes() for path in out.iterdir()}
    assert "model.safetensors" in uploaded and b'model="me/mine"' in uploaded["README.md"]


def refused(status: int) -> HfHubHTTPError:
    request = httpx.Request("POST", "https://hub/api")
    return HfHubHTTPError("refused", response=httpx.Response(status, request=request))


def wrapped(status: int) -> RuntimeError:
    """Return the error for a file of several, as the client raises it."""
    error = RuntimeError("Error while uploading 'model.safetensors' to the Hub.")
    error.__cause__ = refused(status)
    return error


@pytest.mark.parametrize(
    ("call", "error", "code", "message"),
    [
        ("create_repo", refused(401), 2, "the hub does not know the token; run hf auth login"),
        ("create_repo", refused(403), 2, "the token may not write there; take one with write access"),
        ("upload_folder", refused(403), 2, "the token may not write there; take one with write"),
        ("upload_folder", wrapped(403), 2, "the token may not write there; take one with write"),
        ("upload_folder", wrapped(500), 4, "cannot be uploaded to https://hub (refused)"),
        ("create_repo", httpx.ConnectError("no route"), 4, "cannot be uploaded to https://hub (no route)"),
    ],
)  # fmt: skip
def test_an_upload_that_is_refused_leaves_the_export(
    call, error, code, message, hub, models, tmp_path, capsys
):
    getattr(hub, call).side_effect = error
    out = tmp_path / "out"
    assert push(models["masked"], out) == code
    printed = capsys.readouterr().err
    assert f"push (me/mine): {message}" in printed and f"; the export stays in {out}" in printed
    assert (out / "model.safetensors").is_file()


def test_an_upload_without_a_token_is_refused_before_the_export(
    hub, models, tmp_path, monkeypatch, capsys
):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    assert push(models["masked"], tmp_path / "out") == 2
    expected = "push (me/mine): needs a token of the hub; run hf auth login, or set HF_TOKEN"
    assert expected in capsys.readouterr().err and not (tmp_path / "out").exists()

"""The card of an export, whose code is run, and the upload to a server with the hub's endpoints."""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import yaml
from huggingface_hub import constants
from support.hf_models import need

from bert_cli.cli import main

TOKEN = "hf_of_the_test"
# huggingface_hub passes the bytes of an upload to httpx by an old name.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")


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
    ("modern", "onnx", "text-classification", "onnx", r"array"),
    ("modern", "saved-model", "text-classification", "saved-model", r"'logits'"),
    ("modern", "tflite", "text-classification", "tflite", r"'logits': array"),
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
    kind = {"group": "groupbert", "modern": "modernbert"}.get(name, "bert")
    assert front == {**expected, "tags": [kind]}
    assert f"`bert export --format {form}`" in body and str(tmp_path) not in body
    assert re.search(output, run_code(code, out))


# --- the upload


class Hub(ThreadingHTTPServer):
    """What a model's upload asks of the hub: files of more than 1,000 bytes go through git LFS."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answers)
        self.repositories, self.files, self.objects, self.refusal = set(), {}, {}, {}

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def answer(self, status, content):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers["Content-Length"]))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def do_GET(self):
        self.answer(404, {"error": "Repository not found"})

    def is_refused(self):
        for part, status in self.server.refusal.items():
            if part in f"{self.command} {self.path}":
                self.answer(status, {"error": "refused"})
                return True
        return False

    def do_PUT(self):
        data = self.body()
        if self.is_refused():
            return
        self.server.objects[hashlib.sha256(data).hexdigest()] = data
        self.answer(200, {})

    def do_POST(self):
        hub, path, data = self.server, self.path, self.body()
        if self.is_refused():
            return None
        assert self.headers["Authorization"] == f"Bearer {TOKEN}"
        if path == "/api/repos/create":
            asked = json.loads(data)
            name = f"{asked['organization']}/{asked['name']}"
            known = name in hub.repositories
            hub.repositories.add(name)
            return self.answer(409 if known else 200, {"url": f"{hub.address}/{name}"})
        if path == "/api/validate-yaml":
            front = json.loads(data)["content"].split("---\n")[1]
            return self.answer(200, {"errors": [], "warnings": []} if yaml.safe_load(front) else {})
        if path == "/api/models/me/mine/preupload/main":
            files = json.loads(data)["files"]
            modes = [("lfs" if file["size"] > 1000 else "regular") for file in files]
            rows = [
                {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}
                for file, mode in zip(files, modes, strict=True)
            ]
            return self.answer(200, {"files": rows})
        if path == "/me/mine.git/info/lfs/objects/batch":
            objects = json.loads(data)["objects"]
            rows = [
                {**one, "actions": {"upload": {"href": f"{hub.address}/objects/{one['oid']}"}}}
                for one in objects
            ]
            return self.answer(200, {"transfer": "basic", "objects": rows})
        assert path == "/api/models/me/mine/commit/main", path
        for line in data.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                hub.files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                hub.files[value["path"]] = hub.objects[value["oid"]]
        url = f"{hub.address}/me/mine/commit/1"
        return self.answer(200, {"commitUrl": url, "commitOid": "1", "success": True})


@contextmanager
def serving():
    with Hub() as hub:
        Thread(target=hub.serve_forever, daemon=True).start()
        yield hub
        hub.shutdown()


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A local hub, a token for it, and Hugging Face's client that asks it."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with serving() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        monkeypatch.setattr("huggingface_hub.hf_api.ENDPOINT", hub.address, raising=False)
        yield hub


def push(model, out):
    return main(["export", str(model), str(out), "--format", "hf", "--push", "me/mine"])


def test_an_export_arrives_on_the_hub_byte_for_byte_also_a_second_time(
    hub, models, tmp_path, capsys
):
    for number, name in enumerate(("masked", "text")):
        out = tmp_path / name
        assert push(models[name], out) == 0
        assert f"export: uploaded to {hub.address}/me/mine" in capsys.readouterr().out
        files = {path.name: path.read_bytes() for path in out.iterdir()}
        assert {**hub.files, **files} == hub.files and "model.safetensors" in files
        assert b'model="me/mine"' in files["README.md"]
        assert len(hub.objects) > number


@pytest.mark.parametrize(
    ("refusal", "code", "message"),
    [
        ({"repos/create": 401}, 2, "the hub does not know the token; run hf auth login"),
        ({"repos/create": 403}, 2, "the token may not write there; take one with write access"),
        ({"commit/main": 403}, 2, "the token may not write there; take one with write access"),
        # The client wraps the error of a file.
        ({"PUT /objects/": 403}, 2, "the token may not write there; take one with write access"),
        ({"commit/main": 500}, 4, "cannot be uploaded to http://127.0.0.1:"),
        ({"no network": 0}, 4, "cannot be uploaded to http://127.0.0.1:"),
    ],
)
def test_an_upload_that_is_refused_leaves_the_export(
    refusal, code, message, hub, models, tmp_path, capsys
):
    out = tmp_path / "out"
    hub.refusal = refusal
    if "no network" in refusal:
        hub.shutdown()
        hub.server_close()
    assert push(models["masked"], out) == code
    error = capsys.readouterr().err
    assert f"push (me/mine): {message}" in error and f"; the export stays in {out}" in error
    assert (out / "model.safetensors").is_file() and "commit/main" not in str(hub.files)


def test_an_upload_without_a_token_is_refused_before_the_export(
    hub, models, tmp_path, monkeypatch, capsys
):
    monkeypatch.delenv("HF_TOKEN")
    assert push(models["masked"], tmp_path / "out") == 2
    expected = "push (me/mine): needs a token of the hub; run hf auth login, or set HF_TOKEN"
    assert expected in capsys.readouterr().err and not (tmp_path / "out").exists()

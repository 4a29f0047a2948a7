"""`bert serve --mcp`: a client of the Model Context Protocol at the standard streams of a process."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.bert import PYTHONPATH

from bert_cli.cli import main

TEXTS = {
    "tea.txt": f"All about tea\n\n{'Tea is made of leaves. ' * 60}\n\nIt keeps you awake.\n",
    "boats.txt": "Boats\n\nThe boats in the desert wait for rain. 😀\n",
}
ASKED = {
    "protocolVersion": "2025-06-18",
    "capabilities": {},
    "clientInfo": {"name": "t", "version": "1"},
}


class Client:
    """Sends messages to a process, and reads its answers."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.number = 0

    def send(self, line: str) -> None:
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def answer(self, line: str) -> dict[str, Any]:
        """Return the next line of the process after a line of ours."""
        self.send(line)
        answer = json.loads(self.process.stdout.readline())
        assert answer["jsonrpc"] == "2.0" and len({"result", "error"} & answer.keys()) == 1
        return answer

    def ask(self, method: str, params: object = None) -> dict[str, Any]:
        self.number += 1
        message = {"jsonrpc": "2.0", "id": self.number, "method": method}
        answer = self.answer(json.dumps(message | ({} if params is None else {"params": params})))
        assert answer["id"] == self.number
        return answer

    def call(self, name: object, **arguments: object) -> list[dict[str, Any]]:
        result = self.ask("tools/call", {"name": name, "arguments": arguments})["result"]
        assert not result.get("isError"), result
        (content,) = result["content"]
        return json.loads(content["text"])["hits"]


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mcp")
    (folder / "text").mkdir()
    for name, text in TEXTS.items():
        (folder / "text" / name).write_text(text)
    make(folder / "index")
    return folder / "index"


def make(index: Path) -> None:
    assert main(["search", "make", str(index), str(index.parent / "text")]) == 0


@pytest.fixture(scope="module")
def client(index) -> Iterator[Client]:
    """A client after the handshake; the process must end at the end of its input."""
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    words = [sys.executable, "-m", "bert_cli", "serve", index, "--mcp"]
    pipes |= {"encoding": "utf-8", "errors": "surrogateescape"}
    with subprocess.Popen(words, **pipes, env={**os.environ, **PYTHONPATH}) as process:
        client = Client(process)
        result = client.ask("initialize", ASKED)["result"]
        assert result["protocolVersion"] == "2025-06-18" and "tools" in result["capabilities"]
        client.send(json.dumps({"jsonrpc": "2.0", "method": "notifications/initialized"}))
        yield client
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "", "")


def test_tools_are_listed_with_schemas_and_find_and_read_passages(client):
    tools = {tool["name"]: tool for tool in client.ask("tools/list")["result"]["tools"]}
    assert {*tools} == {"search", "read"}
    for tool in tools.values():
        assert tool["description"] and tool["inputSchema"]["type"] == "object"
        assert all(of["description"] for of in tool["inputSchema"]["properties"].values())
    assert tools["search"]["inputSchema"]["required"] == ["question"]
    assert tools["read"]["inputSchema"]["required"] == ["passage"]
    hit, *_ = client.call("search", question="what keeps you awake?", top=3)
    assert hit["document"] == "tea.txt" and "keeps you awake" in hit["text"]
    assert hit["start"] < hit["stop"] and not {"file", "page", "words"} & hit.keys()
    around = client.call("read", passage=hit["passage"])
    assert [part["document"] for part in around] == ["tea.txt"] * len(around) and len(around) > 1
    (alone,) = client.call("read", passage=hit["passage"], around=0)
    assert alone["text"] == hit["text"] and client.call("read", passage=10**6) == []
    assert client.call("search", question="boats")[0]["text"].endswith("😀")


def test_a_client_of_another_version_gets_one_that_is_known(client):
    for asked, version in (
        ("2024-11-05", "2024-11-05"),
        ("2099-01-01", "2025-06-18"),
        ([], "2025-06-18"),
    ):
        result = client.ask("initialize", {**ASKED, "protocolVersion": asked})["result"]
        assert result["protocolVersion"] == version


@pytest.mark.parametrize(("line", "code"), [
    ("{", -32700),
    ("[" * 100_000, -32700),
    ('"\udcff"', -32700),  # a byte that is not UTF-8
    (f'{{"jsonrpc": "2.0", "id": 1, "method": "{"a" * 10**6}"}}', -32601),
    ("[]", -32600),
    ("3", -32600),
    ('{"id": 1, "method": "ping"}', -32600),
    ('{"jsonrpc": "2.0", "id": null, "method": "ping"}', -32600),
    ('{"jsonrpc": "2.0", "id": true, "method": "ping"}', -32600),
    ('{"jsonrpc": "2.0", "id": [], "method": "ping"}', -32600),
    ('{"jsonrpc": "2.0", "id": 1}', -32600),
    ('{"jsonrpc": "2.0", "id": 1, "method": "resources/list"}', -32601),
    ('{"jsonrpc": "2.0", "id": 1, "method": {}}', -32601),
    ('{"jsonrpc": "2.0", "id": 1, "method": "\\ud83d\\u001b[31m"}', -32601),
    ('{"jsonrpc": "2.0", "id": 1, "method": "ping", "params": [1]}', -32602),
    ('{"jsonrpc": "2.0", "id": 1, "method": "tools/call"}', -32602),
    ('{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "delete"}}', -32602),
    ('{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": ["search"]}}', -32602),
    ('{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "search", "arguments": "tea"}}', -32602),
])  # fmt: skip
def test_what_is_no_request_is_refused_and_the_next_one_answered(line, code, client):
    error = client.answer(line)["error"]
    assert error["code"] == code and error["message"].isprintable()
    assert client.ask("ping")["result"] == {}


@pytest.mark.parametrize(("tool", "arguments", "message"), [
    ("search", {}, "question"),
    ("search", {"query": "tea"}, "question: is missing"),
    ("search", {"question": 3}, "question"),
    ("search", {"question": "a" * 20_000}, "more than 10,000"),
    ("search", {"question": "\ud83d tea"}, "question"),
    ("search", {"question": "tea", "top": 10**9}, "top"),
    ("search", {"question": "tea", "half": "meaning"}, "meaning"),
    ("search", {"question": "tea", "path": "/etc/passwd"}, "path: no such name; remove it"),
    ("search", {"question": "tea", "folder": "nowhere"}, "folder ('nowhere'): no document is in it; take one"),
    ("read", {}, "passage: is missing"),
    ("read", {"passage": -1}, "passage"),
    ("read", {"passage": "1; DROP TABLE passages"}, "passage"),
    ("read", {"passage": 10**30}, "passage"),
])  # fmt: skip
def test_hostile_arguments_are_answered_with_what_is_wrong(tool, arguments, message, client):
    result = client.ask("tools/call", {"name": tool, "arguments": arguments})["result"]
    assert result["isError"] and message in result["content"][0]["text"]
    assert client.call("search", question="tea", top=1)[0]["document"] == "tea.txt"


def test_notifications_and_answers_are_not_answered(client):
    for method in ("notifications/cancelled", "tools/call", "nothing"):
        client.send(json.dumps({"jsonrpc": "2.0", "method": method, "params": {"name": "search"}}))
    client.send('\n{"jsonrpc": "2.0", "id": 1, "result": {}}\n')
    line = '{"jsonrpc": "2.0", "id": 1, "method": "ping", "params": null}'
    assert client.answer(line)["result"] == {}


def test_an_index_that_changes_is_answered_from_what_it_has_now(client, index):
    (index.parent / "text" / "new.txt").write_text("A zebra eats grass.\n")
    assert client.call("search", question="zebra") == []
    make(index)
    assert client.call("search", question="zebra")[0]["document"] == "new.txt"
    index.rename(index.with_suffix(".away"))
    gone = client.ask("tools/call", {"name": "search", "arguments": {"question": "tea"}})
    assert gone["result"]["isError"] and "no such index" in gone["result"]["content"][0]["text"]
    index.with_suffix(".away").rename(index)
    assert client.call("search", question="tea")


def test_only_an_index_is_served_and_without_a_page(models, index, bert):
    for words, code, message in (
        ([str(models["text"]), "--mcp"], 3, "no such index"),
        ([str(index), "--mcp", "--port", "80"], 2, "port (--port): has no effect with mcp"),
    ):
        assert message in bert("serve", *words, code=code).err

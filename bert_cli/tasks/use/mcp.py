"""`bert serve INDEX --mcp`: an agent searches an index by the Model Context Protocol.

Each line of standard input and of standard output is a message of JSON-RPC 2.0. Written by hand, because the official
package brings 26 MB for servers over HTTP; tests/tasks/use/test_mcp.py is its client.
"""

import json
import os
import traceback
from contextlib import suppress
from functools import partial

from pydantic import Field

import bert_cli
from bert_cli.data.search.index import AROUND, Hit, Index
from bert_cli.errors import BertError, printable
from bert_cli.files import JSONObject
from bert_cli.parse.load import Loaded, validate
from bert_cli.processes import print_error
from bert_cli.tasks.use.requests import Place, Question

VERSIONS = ("2025-06-18", "2024-11-05")  # of the protocol; who asks for another gets the first
MOST_BYTES = 1_000_000  # of a message
SHOWN = ("document", "title", "page", "start", "stop", "passage", "text")  # of a hit
# Errors of JSON-RPC.
NO_JSON = -32700
NO_REQUEST = -32600
NO_METHOD = -32601
WRONG_PARAMETERS = -32602
FAILED = -32603


class RefusedError(Exception):
    """A message that has no answer: the code, and the problem."""


class Search(Question):
    """Find the passages of the user's own documents that answer a question best, best first.

    Each has its document, the characters from start to stop there, its page in a PDF, and a number for `read`.
    """

    def hits(self, index: Index) -> list[Hit]:
        """Return the passages."""
        return index.ask(self.question, self.top, self.half, self.folder)


class Read(Place):
    """Read a passage that `search` has found, and the passages of its document before and after it."""

    around: int = Field(5, ge=0, le=AROUND)
    """Number of passages before it, and after it."""

    def hits(self, index: Index) -> list[Hit]:
        """Return the passages; none if the index no longer has the number."""
        return index.document(self.passage, self.around)


TOOLS: dict[str, type[Search] | type[Read]] = {"search": Search, "read": Read}


def run(index: Index) -> None:
    """Answer the messages of standard input to its end."""
    output = os.dup(1)
    os.dup2(2, 1)  # whatever prints from now on, also a library in C, prints to standard error
    is_whole = True
    lines = open(0, "rb", closefd=False)  # noqa: SIM115
    with suppress(BrokenPipeError), open(output, "w", encoding="ascii") as answers:
        for line in iter(partial(lines.readline, MOST_BYTES), b""):
            # What follows in a line that is too long is no message.
            if is_whole and line.strip() and (answer := answer_of(line, index)):
                print(json.dumps({"jsonrpc": "2.0", **answer}), file=answers, flush=True)
            is_whole = line.endswith(b"\n")


def answer_of(line: bytes, index: Index) -> JSONObject | None:
    """Return the answer to a request, None to a notification or an answer."""
    number = None
    try:
        message = message_of(line)
        if "id" not in message or "method" not in message:
            return None
        if type(message["id"]) not in (int, str):
            raise RefusedError(NO_REQUEST, "id: is neither an integer nor a string")
        number = message["id"]
        return {"id": number, "result": result_of(message, index)}
    except RefusedError as refused:
        code, problem = refused.args
    except Exception:
        print_error(traceback.format_exc())
        code = FAILED
        problem = "the answer failed: see the standard error of bert serve"
    return {"id": number, "error": {"code": code, "message": printable(problem)}}


def message_of(line: bytes) -> JSONObject:
    """Return a message. Raises RefusedError for anything else."""
    try:
        message = json.loads(line.decode())
    except (ValueError, RecursionError):
        problem = f"a line is not JSON in UTF-8 with at most {MOST_BYTES:,} bytes"
        raise RefusedError(NO_JSON, problem) from None
    is_message = isinstance(message, dict) and message.get("jsonrpc") == "2.0"
    if not is_message or not {"method", "result", "error"} & message.keys():
        raise RefusedError(NO_REQUEST, "a line is not a message of JSON-RPC 2.0")
    return message


def result_of(message: JSONObject, index: Index) -> JSONObject:
    """Return the result of a request. Raises RefusedError for an unknown method or wrong parameters."""
    parameters = message.get("params", {})
    if not isinstance(parameters, dict):
        raise RefusedError(WRONG_PARAMETERS, "params: is not an object")
    match message["method"]:
        case "initialize":
            asked = parameters.get("protocolVersion")
            version = asked if asked in VERSIONS else VERSIONS[0]
            server = {"name": "bert", "version": bert_cli.__version__}
            return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server}
        case "ping":
            return {}
        case "tools/list":
            schemas = {name: form.model_json_schema() for name, form in TOOLS.items()}
            tools = [
                {"name": name, "description": schema["description"], "inputSchema": schema}
                for name, schema in schemas.items()
            ]
            return {"tools": tools}
        case "tools/call":
            return called(parameters, index)
    raise RefusedError(NO_METHOD, f"there is no method {message['method']!r}")


def called(parameters: JSONObject, index: Index) -> JSONObject:
    """Return the result of a tool, also for arguments that it refuses, so that the agent reads why."""
    name = parameters.get("name")
    arguments = parameters.get("arguments", {})
    if not isinstance(name, str) or name not in TOOLS or not isinstance(arguments, dict):
        problem = f"there is no tool {name!r} with such arguments; use {' or '.join(TOOLS)}"
        raise RefusedError(WRONG_PARAMETERS, problem)
    try:
        hits = validate(TOOLS[name], Loaded(arguments)).hits(index)
    except BertError as mistake:
        return {"content": [{"type": "text", "text": printable(str(mistake))}], "isError": True}
    rows = [
        {n: v for n, v in hit._asdict().items() if n in SHOWN and v is not None} for hit in hits
    ]
    return {"content": [{"type": "text", "text": json.dumps(rows, ensure_ascii=False)}]}

"""`bert serve INDEX --mcp`: an agent searches an index by the Model Context Protocol.

Each line of standard input and of standard output is a message of JSON-RPC 2.0. Written by hand, because the official
package brings 26 MB for servers over HTTP; tests/tasks/use/test_mcp.py is its client.
"""

import json
import traceback

import bert_cli
from bert_cli.data.search.index import Index
from bert_cli.errors import BertError, printable
from bert_cli.files import JSONObject
from bert_cli.processes import print_error
from bert_cli.tasks.use.requests import TOOLS, find

# The newest first.
VERSIONS = ("2025-06-18", "2024-11-05")  # of the protocol; who asks for another gets the first
# Errors of JSON-RPC.
NO_JSON = -32700
NO_REQUEST = -32600
NO_METHOD = -32601
WRONG_PARAMETERS = -32602
FAILED = -32603


def answer_of(index: Index, line: bytes) -> str:
    """Return the answer to a request; "" to a notification, to an answer, and to an empty line."""
    if not line.strip():
        return ""
    number = None
    try:
        message = json.loads(line.decode())
    except (ValueError, RecursionError):
        outcome = refusal(NO_JSON, "a line is not JSON in UTF-8")
    else:
        is_message = isinstance(message, dict) and message.get("jsonrpc") == "2.0"
        is_message = is_message and bool({"method", "result", "error"} & message.keys())
        if not is_message or type(message.get("id", 0)) not in (int, str):
            outcome = refusal(NO_REQUEST, "a line is not a message of JSON-RPC 2.0")
        elif "id" not in message or "method" not in message:
            return ""
        else:
            number = message["id"]
            outcome = outcome_of(message, index)
    return json.dumps({"jsonrpc": "2.0", "id": number, **outcome})


def outcome_of(message: JSONObject, index: Index) -> JSONObject:
    """Return the result of a request, or its error."""
    parameters = message.get("params") or {}
    if not isinstance(parameters, dict):
        return refusal(WRONG_PARAMETERS, "params: is not an object")
    match message["method"]:
        case "initialize":
            version = parameters.get("protocolVersion")
            if version not in VERSIONS:
                version = VERSIONS[0]
            server = {"name": "bert", "version": bert_cli.__version__}
            facts: JSONObject = {"capabilities": {"tools": {}}, "serverInfo": server}
            return {"result": {"protocolVersion": version, **facts}}
        case "ping":
            return {"result": {}}
        case "tools/list":
            schemas = {name: form.model_json_schema() for name, form in TOOLS.items()}
            tools = [
                {"name": name, "description": schema["description"], "inputSchema": schema}
                for name, schema in schemas.items()
            ]
            return {"result": {"tools": tools}}
        case "tools/call":
            return call(parameters, index)
    return refusal(NO_METHOD, f"there is no method {message['method']!r}")


def call(parameters: JSONObject, index: Index) -> JSONObject:
    """Return the result of a tool, also for arguments that it refuses, so that the agent reads why."""
    name = parameters.get("name")
    arguments = parameters.get("arguments") or {}
    if not isinstance(name, str) or name not in TOOLS or not isinstance(arguments, dict):
        problem = f"there is no tool {name!r} with such arguments; use {' or '.join(TOOLS)}"
        return refusal(WRONG_PARAMETERS, problem)
    try:
        answer = find(name, index, ("file", "first", "score", "words"), arguments)
    except BertError as mistake:
        content = {"type": "text", "text": printable(str(mistake))}
        return {"result": {"content": [content], "isError": True}}
    except Exception:
        print_error(traceback.format_exc())
        return refusal(FAILED, "the answer failed: see the standard error of bert serve")
    content = {"type": "text", "text": json.dumps(answer, ensure_ascii=False)}
    return {"result": {"content": [content]}}


def refusal(code: int, problem: str) -> JSONObject:
    """Return an error of JSON-RPC."""
    return {"error": {"code": code, "message": printable(problem)}}

"""Answers over HTTP: POST {"texts": [...]}, get a label and its probability for each text, or its vector.

    python3 examples/serve.py EXPORT PORT

EXPORT is a folder of `bert export --format onnx`. The program needs onnxruntime and tokenizers, but not bert.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

folder = Path(sys.argv[1])
config = json.loads((folder / "config.json").read_text())
tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
tokenizer.enable_truncation(config["max_position_embeddings"])
tokenizer.enable_padding()
tokenizer.encode_special_tokens = True  # "[SEP]" in a text is plain characters
session = onnxruntime.InferenceSession(folder / "model.onnx")
names = [column.name for column in session.get_inputs()]
output = session.get_outputs()[0].name


def answers(texts: list[str], dimensions: int | None = None) -> list:
    """Return a label with its probability for each text, or its vector."""
    encoded = tokenizer.encode_batch(texts)
    columns = {
        "input_ids": np.array([text.ids for text in encoded]),
        "attention_mask": np.array([text.attention_mask for text in encoded]),
        "token_type_ids": np.array([text.type_ids for text in encoded]),
    }
    (values,) = session.run([output], {name: columns[name] for name in names})
    if output == "last_hidden_state":  # the direction of the mean over tokens
        vectors = (values * columns["attention_mask"][:, :, None]).sum(1)[:, :dimensions]
        return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).tolist()
    probabilities = np.exp(values - values.max(1, keepdims=True))
    probabilities /= probabilities.sum(1, keepdims=True)
    return [
        {"label": config["id2label"][str(row.argmax())], "probability": float(row.max())}
        for row in probabilities
    ]


class Handler(BaseHTTPRequestHandler):
    """Answer requests on the loopback interface."""

    def do_POST(self) -> None:
        """Answer one request."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps(answers(**request)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()

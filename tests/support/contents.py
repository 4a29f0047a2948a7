"""Files of tests."""

import json
from pathlib import Path


def put(path: Path, content: object) -> Path:
    """Write bytes, a text, or an object as JSON, and return the path."""
    text = content if isinstance(content, bytes | str) else json.dumps(content)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path

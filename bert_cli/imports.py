"""Import TensorFlow and Keras without log noise and without integrations that the tool does not use."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

KERAS_WRAPS = ("sklearn", "matplotlib")
NOTHING = "3"
"""The TF_CPP_MIN_LOG_LEVEL that hides all of TensorFlow's messages below a fatal error."""


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Import Keras without scikit-learn and matplotlib, and hide standard error unless an import fails.

    Keras imports both packages for wrappers and image galleries, which takes a third of the time that
    TensorFlow and Keras need to load. TensorFlow logs ten lines during its import, before any log level
    applies; `--log-level` and TF_CPP_MIN_LOG_LEVEL=0 show them.
    """
    hidden: dict[str, Any] = {name: None for name in KERAS_WRAPS if name not in sys.modules}
    sys.modules.update(hidden)
    try:
        with _hidden_standard_error():
            yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)


@contextmanager
def _hidden_standard_error() -> Iterator[None]:
    """Discard what the process writes to file descriptor 2, or show it when the block raises."""
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", NOTHING) != NOTHING:
        yield
        return
    sys.stderr.flush()
    with tempfile.TemporaryFile() as captured:
        descriptor = os.dup(2)
        os.dup2(captured.fileno(), 2)
        try:
            yield
        except BaseException:
            captured.seek(0)
            os.write(descriptor, captured.read())
            raise
        finally:
            os.dup2(descriptor, 2)
            os.close(descriptor)

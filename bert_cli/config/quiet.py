"""TensorFlow and Keras imported without what they say of themselves and what nobody here uses of them.

For the door, which imports a command's module, and for the few places that need TensorFlow only then.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

KERAS_WRAPS = ("sklearn", "matplotlib")
NOTHING = "3"
"""TF_CPP_MIN_LOG_LEVEL, of all that TensorFlow says below an error of its own."""


@contextmanager
def lightly() -> Iterator[None]:
    """Hide from Keras, while it is imported, what it imports for parts that nothing here uses.

    Its wrappers for scikit-learn and its picture galleries take a third of the time that TensorFlow
    and Keras need to be there, for every process of a run. Scores import theirs afterwards.
    """
    hidden: dict[str, Any] = {name: None for name in KERAS_WRAPS if name not in sys.modules}
    sys.modules.update(hidden)
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)


@contextmanager
def quietly() -> Iterator[None]:
    """Keep back what is written to standard error, unless it ends in an exception.

    TensorFlow writes ten lines about itself while it is imported, before any log level holds.
    `--log-level` lets them through, and so does TF_CPP_MIN_LOG_LEVEL=0 in the environment.
    """
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", NOTHING) != NOTHING:
        yield
        return
    sys.stderr.flush()
    with tempfile.TemporaryFile() as kept:
        before = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException:
            kept.seek(0)
            os.write(before, kept.read())
            raise
        finally:
            os.dup2(before, 2)
            os.close(before)

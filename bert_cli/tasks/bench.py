"""`bert bench --list`: the standard benchmarks.

A name behind `bert bench` is written out to its command line by the door, so all that is left here is
to tell which names there are.
"""

import shlex

from bert_cli.config.bench import BenchSettings
from bert_cli.config.benchmarks import benchmarks
from bert_cli.config.terminal import table


def run(settings: BenchSettings) -> None:
    """Print each benchmark with what it is for and the command line that it stands for."""
    assert settings.listed
    rows = [
        (name, one.about, shlex.join(["bert", *one.words])) for name, one in benchmarks().items()
    ]
    table(("name", "what", "stands for"), rows)

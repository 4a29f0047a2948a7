"""What the tests of fine-tuning share: models and files of vectors, runs in other layouts, another tokenizer."""

import pytest
from support.tiny_models import PIECES
from support.vectors import write_home

from bert_cli.data.tokens.tokenizer import Normalization, read_tokenizer, write_vocabulary


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    return write_home(tmp_path_factory.mktemp("embed"))


@pytest.fixture
def larger_tokenizer(tmp_path):
    """The tokenizer of the tiny models with one more piece."""
    (tmp_path / "larger").mkdir()
    pieces = "".join(f"{piece}\n" for piece in [*PIECES, "more"])
    write_vocabulary(tmp_path / "larger", pieces.encode(), Normalization())
    return read_tokenizer(tmp_path / "larger")

"""Tokenizers of a few pieces."""

import pytest

from bert_cli.data.tokens.tokenizer import Normalization, read_tokenizer, write_vocabulary


@pytest.fixture(scope="session")
def tokenizer_of(tmp_path_factory):
    def make(pieces):
        folder = tmp_path_factory.mktemp("tokenizer")
        write_vocabulary(folder, "".join(f"{p}\n" for p in pieces).encode(), Normalization())
        return read_tokenizer(folder)

    return make

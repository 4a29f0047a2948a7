"""Models for the tests of prediction and export."""

import pytest
from support.hf_models import Models


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Name -> folder of a random model of transformers with a tokenizer."""
    return Models(tmp_path_factory.mktemp("models"))

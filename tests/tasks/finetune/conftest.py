"""The models and files of the tests of vectors."""

import pytest
from support.vectors import write_home


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    """A folder of `write_home`."""
    return write_home(tmp_path_factory.mktemp("embed"))

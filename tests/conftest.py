"""What all tests share: where the real data is, when it is there."""

import os
from pathlib import Path

import pytest

REAL_DATA = Path(os.environ.get("BERT_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Root of the real dumps, texts and vocabularies; the test is skipped where they are absent."""
    if not REAL_DATA.is_dir():
        message = f"no real data at {REAL_DATA}; set BERT_SHARED_DATA to a folder that has it"
        if os.environ.get("BERT_REQUIRE_SHARED_DATA") == "1":
            pytest.fail(message)
        pytest.skip(message)
    return REAL_DATA

"""What all tests share: where the real data is, when it is there."""

import os
import sys
from pathlib import Path

import pytest

LOGICAL_DEVICES = 8

REAL_DATA = Path(os.environ.get("BERT_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))


def pytest_collection_finish() -> None:
    """Cut the CPU into devices for all layouts that are tested: TensorFlow allows it only once."""
    if "tensorflow" in sys.modules:
        import tensorflow as tf

        cpu = tf.config.list_physical_devices("CPU")[0]
        one = tf.config.LogicalDeviceConfiguration()
        tf.config.set_logical_device_configuration(cpu, [one] * LOGICAL_DEVICES)
        # A thread for every stage of every replica, and some to spare.
        tf.config.threading.set_inter_op_parallelism_threads(2 * LOGICAL_DEVICES)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Root of the real dumps, texts and vocabularies; the test is skipped where they are absent."""
    if not REAL_DATA.is_dir():
        message = f"no real data at {REAL_DATA}; set BERT_SHARED_DATA to a folder that has it"
        if os.environ.get("BERT_REQUIRE_SHARED_DATA") == "1":
            pytest.fail(message)
        pytest.skip(message)
    return REAL_DATA

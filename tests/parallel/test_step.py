"""What all engines do around a step: counts, divisors, means, and the error of a full memory."""

from types import SimpleNamespace

import numpy as np
import pytest
from support.threads import on_each_rank

from bert_cli.errors import DeviceError
from bert_cli.parallel.engine import Engine, StepResult, UpdateRequest, UpdateResult, count

TABLE = {"masked": "masked_lm_weights", "pairs": "absent"}


class Fake(Engine):
    """Its sums and norms are known."""

    slots = compile = gather_weights = forward = evaluate = predict = None
    head = SimpleNamespace(
        COUNTS=TABLE,
        MEANS={"a_loss": ("a", "masked"), "b_loss": ("b", "pairs"), "c": ("c", "pairs")},
    )

    def __init__(self, group):
        self.group = group

    def _run_step(self, batch, request, divisors):
        self.divisors = divisors
        return StepResult({"a": 1.0 + self.group.rank, "b": 2.0}, 9.0, 4.0)

    def _is_out_of_memory(self, error):
        return isinstance(error, MemoryError)


def batch_of(weights):
    mask = np.array([[[1, 1, 2, 0]], [[1, 1, 0, 0]]], np.int32)
    return {"input_ids": mask, "input_mask": mask, "masked_lm_weights": np.float32(weights)}


def test_counts_are_of_all_micro_batches_and_of_every_sequence_of_a_pack():
    counts = count(batch_of([[[1, 1, 0]], [[1, 0, 0]]]), TABLE)
    assert counts == {"masked": 3.0, "pairs": 3.0, "examples": 3.0, "tokens": 5.0}


@pytest.mark.parametrize("masked", [0.0, 4.0])
def test_sums_counts_and_norms_are_of_all_processes_and_no_divisor_is_zero(masked):
    request = UpdateRequest(step=7, first_micro_batch=10)

    def update(group):
        engine = Fake(group)
        # All masked words are those of one rank.
        batch = batch_of([masked * group.rank])
        counts = {"masked": masked, "pairs": 6.0, "examples": 6.0, "tokens": 10.0}
        assert engine.update(batch, request) == UpdateResult({"a": 3.0, "b": 4.0}, counts, 3.0, 2.0)
        assert engine.divisors == counts | {"masked": masked or 1.0}
        assert engine.first_index(batch, request) == 10 + 2 * group.rank
        assert group.activity == "step 8"
        means = {"a_loss": 3.0 / masked} if masked else {}
        assert engine.means({"a": 3.0, "b": 4.0}, counts) == means | {"b_loss": 4.0 / 6.0}

    assert on_each_rank(update) == [None, None]


def test_a_full_memory_is_an_error_with_a_remedy_and_another_error_is_itself():
    engine = Fake(None)
    problem = "micro_batch_size: the run does not fit the device's memory; lower it and raise grad_"
    with pytest.raises(DeviceError, match=problem), engine.reporting_out_of_memory():
        raise MemoryError
    with pytest.raises(KeyError), engine.reporting_out_of_memory():
        raise KeyError

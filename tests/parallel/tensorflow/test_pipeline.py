"""The schedule of a pipeline: complete, free of deadlock, with no more saved activations than promised."""

from itertools import accumulate

from bert_cli.parallel.tensorflow.pipeline import Work, work_of

SIZES = [(p, m) for p in (1, 2, 3, 5, 8) for m in (1, 2, 4, 7, 32)]


def max_in_flight(work: list[Work]) -> int:
    """Return the most micro-batches whose activations are saved at once."""
    changes = {"forward": 1, "backward": -1}
    return max(accumulate(changes[kind] for kind, _ in work))


def test_every_stage_runs_every_micro_batch_forward_and_then_backward():
    for stages, micro_batches in SIZES:
        every = list(range(micro_batches))
        last = work_of(stages - 1, stages, micro_batches)
        assert last == [("forward_backward", number) for number in every]
        for stage in range(stages - 1):
            work = work_of(stage, stages, micro_batches)
            # In the order of the stream, so that gradients are added in the order of one device.
            for kind in ("forward", "backward"):
                assert [item.micro_batch for item in work if item.kind == kind] == every
            assert len(work) == 2 * micro_batches
            assert all(work.index(("forward", n)) < work.index(("backward", n)) for n in every)
            assert max_in_flight(work) == min(stages - stage, micro_batches)

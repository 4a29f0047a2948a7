"""The schedules of a pipeline: complete, free of deadlock, with no more saved activations than promised; traces."""

import json

import pytest

from bert_cli.errors import ConfigError
from bert_cli.parallel.tensorflow.pipeline import SCHEDULES, Trace, Work, work_of

SIZES = [(p, m) for p in (1, 2, 3, 5, 8) for m in (1, 2, 4, 7, 32)]


def schedules(name: str, stages: int, micro_batches: int) -> list[list[Work]]:
    return [work_of(name, stage, stages, micro_batches) for stage in range(stages)]


def max_in_flight(work: list[Work]) -> int:
    """Return the most micro-batches whose activations are saved at once."""
    in_flight = most = 0
    for kind, _ in work:
        in_flight += kind != "backward"
        most = max(most, in_flight)
        in_flight -= kind != "forward"
    return most


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_stage_runs_every_micro_batch_forward_and_then_backward(name):
    for stages, micro_batches in SIZES:
        every = list(range(micro_batches))
        *others, last = schedules(name, stages, micro_batches)
        assert last == [("forward-backward", number) for number in every]
        for work in others:
            # In the order of the stream, so that gradients are added in the order of one device.
            for kind in ("forward", "backward"):
                assert [item.micro_batch for item in work if item.kind == kind] == every
            assert len(work) == 2 * micro_batches
            index = {item: number for number, item in enumerate(work)}
            assert all(index["forward", n] < index["backward", n] for n in every)


def test_stage_k_of_p_saves_activations_of_p_minus_k_micro_batches_with_1f1b_and_of_all_with_gpipe():
    for stages, micro_batches in SIZES:
        saved = [max_in_flight(work) for work in schedules("1F1B", stages, micro_batches)]
        assert saved == [min(stages - stage, micro_batches) for stage in range(stages)]
        saved = [max_in_flight(work) for work in schedules("GPipe", stages, micro_batches)]
        assert saved == [micro_batches] * (stages - 1) + [1]


def test_the_order_of_a_middle_stage_is_that_of_the_papers():
    f, b = "forward", "backward"
    order = [(f, 0), (f, 1), (f, 2), (b, 0), (f, 3), (b, 1), (b, 2), (b, 3)]
    assert work_of("1F1B", 1, 4, 4) == order
    assert work_of("GPipe", 1, 4, 2) == [(f, 0), (f, 1), (b, 0), (b, 1)]


def test_a_trace_is_written_in_the_format_of_its_viewers_or_rejected(tmp_path):
    trace = Trace(1)
    with trace.span(0, 2, "backward", 7):
        pass
    trace.write(tmp_path / "deep" / "trace.json", rank=3)
    (event,) = json.loads((tmp_path / "deep" / "trace.json").read_text())["traceEvents"]
    assert event["name"] == "backward 7" and event["ph"] == "X" and event["dur"] >= 0
    assert (event["pid"], event["tid"]) == ("rank 3", "replica 0 stage 2")
    with pytest.raises(ConfigError, match=r"parallel\.trace"):
        trace.write(tmp_path / "deep" / "trace.json" / "trace.json", rank=0)

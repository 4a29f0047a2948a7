"""The order of a pipeline's work: complete, possible, and as small as promised."""

import pytest

from bert_cli.parallel.tensorflow.schedule import SCHEDULES, Work, max_in_flight

SIZES = [(p, m) for p in (1, 2, 3, 5, 8) for m in (1, 2, 4, 7, 32)]


def orders(name: str, stages: int, micro_batches: int) -> list[list[Work]]:
    return [SCHEDULES[name](stage, stages, micro_batches) for stage in range(stages)]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_every_stage_takes_every_micro_batch_forward_and_then_backward(name, stages, micro_batches):
    for number, order in enumerate(orders(name, stages, micro_batches)):
        seen: dict[str, list[int]] = {"forward": [], "backward": [], "forward-backward": []}
        for kind, micro_batch in order:
            seen[kind].append(micro_batch)
        every = list(range(micro_batches))
        if number == stages - 1:
            assert seen == {"forward": [], "backward": [], "forward-backward": every}
        else:
            # In the order of the stream, so that sums are added in the order of one device.
            assert seen == {"forward": every, "backward": every, "forward-backward": []}
            places = {work: place for place, work in enumerate(order)}
            assert all(places["forward", n] < places["backward", n] for n in every)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_no_two_stages_wait_for_each_other(name, stages, micro_batches):
    """Play the lists with queues: all of them come to their end."""
    rest = orders(name, stages, micro_batches)
    up = [0] * (stages + 1)
    up[0] = micro_batches
    down = [0] * (stages + 1)
    while any(rest):
        moved = False
        for stage, order in enumerate(rest):
            if not order:
                continue
            kind = order[0].kind
            queue = down if kind == "backward" else up
            place = stage + 1 if kind == "backward" else stage
            if queue[place]:
                queue[place] -= 1
                order.pop(0)
                moved = True
                if kind == "forward":
                    up[stage + 1] += 1
                else:
                    down[stage] += 1
        assert moved, rest
    assert down[0] == micro_batches


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_with_1f1b_stage_k_of_p_keeps_at_most_p_minus_k_micro_batches(stages, micro_batches):
    for number, order in enumerate(orders("1F1B", stages, micro_batches)):
        assert max_in_flight(order) == min(stages - number, micro_batches)


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_with_gpipe_every_stage_but_the_last_keeps_all(stages, micro_batches):
    kept = [max_in_flight(order) for order in orders("GPipe", stages, micro_batches)]
    assert kept == [micro_batches] * (stages - 1) + [1]


def test_the_order_of_a_middle_stage_reads_as_in_the_papers():
    f, b = "forward", "backward"
    order = [(f, 0), (f, 1), (f, 2), (b, 0), (f, 3), (b, 1), (b, 2), (b, 3)]
    assert SCHEDULES["1F1B"](1, 4, 4) == order
    assert SCHEDULES["GPipe"](1, 4, 2) == [(f, 0), (f, 1), (b, 0), (b, 1)]

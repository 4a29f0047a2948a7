"""Cutting the model's blocks into stages, and noting what they do."""

import json

import pytest

from bert_cli.config.model import BertConfig
from bert_cli.errors import ConfigError
from bert_cli.model.bert import block_names
from bert_cli.parallel.tensorflow.stage import split_blocks
from bert_cli.parallel.tensorflow.trace import Bar, Trace, overlap
from bert_cli.parallel.tensorflow.update import buckets

NAMES = block_names(BertConfig(num_hidden_layers=3))


def test_hid_stands_for_the_next_layer():
    stages = [["emb", "hid"], ["hid", "hid", "enc_out"], ["pool", "heads"]]
    wanted = [["emb", "hid_0"], ["hid_1", "hid_2", "enc_out"], ["pool", "heads"]]
    assert split_blocks(stages, NAMES) == wanted


@pytest.mark.parametrize(
    "stages",
    [
        [["emb", "hid", "hid", "enc_out", "pool", "heads"]],
        [["emb", "hid", "hid", "hid", "hid", "enc_out", "pool", "heads"]],
        [["emb"], ["hid", "hid", "hid"], ["pool", "enc_out", "heads"]],
    ],
)
def test_stages_that_do_not_list_the_blocks_in_order_are_refused(stages):
    with pytest.raises(ValueError, match="do not list the blocks"):
        split_blocks(stages, NAMES)


def test_buckets_hold_what_fits_and_a_larger_weight_travels_alone():
    sizes = {"a": 3, "b": 4, "c": 30, "d": 1, "e": 9, "f": 1}
    assert buckets(sizes, 10) == [["a", "b"], ["c"], ["d", "e"], ["f"]]
    assert buckets({}, 10) == []


def test_the_time_in_which_two_stages_work_is_counted_once():
    bars = [Bar(0, 0, "forward", 0, 0.0, 4.0), Bar(0, 1, "forward-backward", 0, 1.0, 3.0)]
    bars += [Bar(1, 0, "forward", 1, 2.0, 3.0), Bar(0, 0, "forward", 1, 6.0, 7.0)]
    assert overlap(bars) == (5.0, 2.0)


def test_a_trace_is_what_its_viewers_read(tmp_path):
    trace = Trace(1)
    with trace.span(0, 2, "backward", 7):
        pass
    trace.write(tmp_path / "deep" / "trace.json", rank=3)
    (event,) = json.loads((tmp_path / "deep" / "trace.json").read_text())["traceEvents"]
    assert event["name"] == "backward 7" and event["ph"] == "X" and event["dur"] >= 0
    assert (event["pid"], event["tid"]) == ("rank 3", "replica 0 stage 2")


def test_a_trace_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"parallel\.trace"):
        Trace(1).write(tmp_path / "file" / "trace.json", rank=0)

"""The table of accelerators, and the names of targets."""

import pytest

from bert_cli.errors import ConfigError
from bert_cli.planning.targets import EXAMPLES, find_target


def test_a_target_is_a_slice_of_tpus_or_gpus_of_a_host():
    for name in EXAMPLES.split(", "):
        assert find_target(name).name == name
    assert (find_target("v5e:4x4").devices, find_target("v5p:2x2x2").devices) == (16, 8)
    assert (find_target("v5e:4x4").topology, find_target("h100:8").topology) == ("v5e:4x4", "1x1x8")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h10:8", "--compile-for (h10:8): no such accelerator; did you mean"),
        ("mi300:8", "no such accelerator; see bert plan --list-targets"),
        ("v5e", "must end with 2 numbers above 0; for example v5e:2x2"),
        ("v5e:4x4x4", "must end with 2 numbers above 0; for example v5e:2x2"),
        ("v5p:4x4", "must end with 3 numbers above 0; for example v5p:2x2x2"),
        ("h100:0", "must end with 1 number above 0; for example h100:8"),
        ("h100:16", "between 8 GPUs of a host; use at most h100:8"),
    ],
)
def test_another_name_is_refused(name, message):
    with pytest.raises(ConfigError) as error:
        find_target(name)
    assert message in str(error.value)

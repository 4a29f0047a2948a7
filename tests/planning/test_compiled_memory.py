"""The estimates for JAX on accelerators, against the compilers' numbers in docs/lab/measured.md."""

import re
from pathlib import Path

import pytest

from bert_cli.config.tools import PlanSettings, PlanSquadSettings
from bert_cli.parse.load import load
from bert_cli.planning.layout import fullest
from bert_cli.planning.targets import ACCELERATORS
from bert_cli.planning.workload import workload_of

PAGE = Path(__file__).parents[2] / "docs/lab/measured.md"
COMMON = [
    "--engine", "jax", "--precision", "mixed_bfloat16", "--parallel.layout", "given", "--parallel.pipeline-stages",
    "null", "--parallel.pipeline-device-mapping", "null",
]  # fmt: skip
BATCH = ("micro-batch-size", "replicas", "grad-acc-steps-per-replica")
ROW = re.compile(
    r"^\| `(.+)` \| (\w+) \| ([\dx ]+) \| ([\d.]+) GB \| ([\d.]+) GB, (\S+) % \|$", re.M
)


def test_the_estimate_is_within_10_percent_of_the_compiler_in_all_cases_of_the_table():
    rows = ROW.findall(PAGE.read_text("utf-8"))
    assert len(rows) == 27 and {"v5e", "h100"} == {target for _, target, *_ in rows}
    for flags, target, sizes, compiled, estimated, difference in rows:
        words = flags.split()
        numbers = zip(BATCH, sizes.split(" x "), strict=True)
        batch = [word for name, n in numbers for word in (f"--global-batch.{name}", n)]
        is_squad = words[0] == "squad"
        shape = PlanSquadSettings if is_squad else PlanSettings
        settings = load(shape, [*COMMON, *words[is_squad:], *batch], "plan")[0]
        needed = fullest(workload_of(settings), ACCELERATORS[target].kind)[1].total / 1e9
        assert needed == pytest.approx(float(compiled), rel=0.1), flags
        assert (f"{needed:.2f}", f"{round(100 * (needed / float(compiled) - 1)):+d}") == (
            estimated,
            difference,
        ), flags

"""The work of compiled programs. The stored ones are a scan over three products of 4096 x 4096 in bfloat16 and its
gradient on four devices, compiled by libtpu 0.0.42.1 and jax-cuda12-plugin 0.10.2.
"""

from pathlib import Path

import pytest

from bert_cli.planning.compiled import Array, Program, _group_size
from bert_cli.planning.targets import ACCELERATORS

PROGRAMS = Path(__file__).with_name("programs")
MIB = 2**20
# Bytes in units of 1,024 x 4,096 x 2, the hidden states of a device; a matrix has 4 of these units.
UNIT = 8 * MIB


def program_of(*lines: str) -> Program:
    body = "\n".join(f"  {line}" for line in lines)
    return Program(f"ENTRY %main (p: f32[4]) -> f32[4] {{\n{body}\n}}\n")


def work(program: Program, kind: str = "h100"):
    accelerator = ACCELERATORS[kind]
    return program.work(accelerator.peaks, accelerator.bandwidth)


@pytest.mark.parametrize(("name", "kind"), [("v5e_4", "v5e"), ("h100_4", "h100")])
def test_products_and_collectives_in_loops_count_as_often_as_they_run(name, kind):
    done = work(Program((PROGRAMS / f"{name}.txt").read_text()), kind)
    assert done.flops == 3 * 3 * 2 * 1024 * 4096 * 4096
    gradients = 3 * 4096 * 4096 * 2
    assert dict(done.collectives) == {"all-reduce": [3, gradients, 2 * 3 / 4 * gradients]}


def test_a_slice_of_stacked_weights_is_read_and_an_update_in_place_is_written_once():
    done = work(Program((PROGRAMS / "v5e_4.txt").read_text()), "v5e")
    # The copy of the input; three times a state saved, a weight read and a state written, two states
    # read for a gradient, a weight and a state again, a gradient written; the zeros of the gradients.
    assert done.moved // MIB * MIB == UNIT * (1 + 3 * (1 + 5 + 2 + 5 + 4) + 3 * 4)
    assert done.seconds > done.seconds_of_products >= done.flops / ACCELERATORS["v5e"].peak
    assert max(done.parts, key=done.parts.get) == "f/dot_general"


def test_batch_axes_of_a_convolution_count_no_padding():
    program = program_of(
        "%a = bf16[8,4,128,64]{3,2,1,0} parameter(0)",
        "%b = bf16[8,4,128,64]{3,2,1,0} parameter(1)",
        "ROOT %c = bf16[8,4,128,128]{3,2,1,0} convolution(%a, %b), "
        "window={size=8x4 stride=7x3 lhs_dilate=8x4}, dim_labels=01bf_01oi->01bf",
    )
    assert work(program).flops == 2 * 8 * 4 * 128 * 128 * 64


def test_exact_float32_has_a_lower_peak():
    lines = (
        "%a = f32[512,512]{1,0} parameter(0)",
        "ROOT %d = f32[512,512]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    )
    exactly = f"{lines[1]}, operand_precision={{highest,highest}}"
    fast = work(program_of(*lines))
    exact = work(program_of(lines[0], exactly))
    assert fast.flops == exact.flops == 2 * 512**3
    assert exact.seconds == exact.flops / ACCELERATORS["h100"].peaks["highest"] > fast.seconds


def test_the_tiles_of_a_tpu_pad_an_array_and_its_fast_memory_is_not_moved():
    assert Array("bf16", (3, 100, 64), "2,1,0:T(8,128)(2,1)").bytes == 3 * 104 * 128 * 2
    assert Array("f32", (128, 3), "0,1:T(4,128)").bytes == 4 * 128 * 4
    assert Array("pred", (10,), "").bytes == 10
    assert not Array("f32", (4,), "0:T(128)S(1)").is_in_memory


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", 4),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0','axis_1'}", 8),
        ("mesh['axis_0'=8] {'axis_0':(1)4}", 4),
        ("[2,16]<=[32]", 16),
        ("{{0,1,2},{3,4,5}}", 3),
    ],
)
def test_every_form_of_the_groups_of_a_collective_has_its_size(groups, size):
    assert _group_size(f"channel_id=1, replica_groups={groups}, to_apply=%add") == size


# The bytes that each of 2, 4 and 8 devices sends of 4,096 bytes, which are a part of the result of a gather.
SENT = {
    "all-reduce(%p), to_apply=%add": (4096, 6144, 7168),
    "all-gather(%p), dimensions={0}": (4096, 12288, 28672),
    "reduce-scatter(%p), dimensions={0}": (2048, 3072, 3584),
    "all-to-all(%p), dimensions={0}": (2048, 3072, 3584),
    "collective-permute(%p)": (4096, 4096, 4096),
}


@pytest.mark.parametrize("line", SENT)
def test_a_device_sends_the_bytes_of_a_ring(line):
    for devices, sent in zip((2, 4, 8), SENT[line], strict=True):
        group = ",".join(map(str, range(devices)))
        lines = (
            "%p = f32[1024]{0} parameter(0)",
            f"ROOT %c = f32[1024]{{0}} {line}, replica_groups={{{{{group}}}}}",
        )
        ((_, _, number),) = work(program_of(*lines)).collectives.values()
        assert number == sent

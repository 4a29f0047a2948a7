"""The GPUs that a process of a host gets."""

import pytest

from bert_cli.errors import DeviceError
from bert_cli.parallel.devices import gpus_of


def test_gpus_are_divided_evenly(tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: H200\n  MIG 1g.18gb Device 0:\nGPU 1: H200'\n")
    smi.chmod(0o755)
    environment = {"PATH": str(tmp_path)}
    assert [gpus_of(rank, 2, environment) for rank in (0, 1)] == [["0"], ["1"]]
    environment["CUDA_VISIBLE_DEVICES"] = "3,GPU-abc, 5,6"
    assert gpus_of(1, 2, environment) == ["5", "6"]
    # A single process uses all, as without a launcher.
    assert gpus_of(0, 1, environment) == []
    with pytest.raises(DeviceError, match=r"GPUs \(4 on .*divided evenly among 3 processes"):
        gpus_of(0, 3, environment)
    for hidden in ("", "-1", "-1,0"):
        assert gpus_of(0, 2, {"CUDA_VISIBLE_DEVICES": hidden}) == []
    smi.write_text(f"{smi.read_text()}exit 9\n")
    assert gpus_of(0, 2, {"PATH": str(tmp_path)}) == []

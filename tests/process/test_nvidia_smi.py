"""What nvidia-smi reports of a machine's GPUs, by a command of this name before all others."""

import pytest

from hpc_elastic.gpus import Gpu, count_devices, list_gpus

TWO = "GPU 0: NVIDIA H100 (UUID: GPU-1)\nGPU 1: NVIDIA H100 (UUID: GPU-2)\n"
LISTED = "0, GPU-aa, 81559, 4, 30\n1, GPU-bb, 81559, 4, 30\n"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (TWO, (2, 0)),
        (TWO + "  MIG 1g.10gb Device 0: (UUID: MIG-1)\n", (2, 1)),
        ("No devices were found\n", (0, 0)),
    ],
)
def test_gpus_and_their_slices_are_counted(nvidia_smi, answer, expected):
    """A slice stands below its GPU."""
    nvidia_smi(answer)
    assert count_devices() == expected


def test_devices_without_nvidia_smi_are_unknown(tmp_path, monkeypatch):
    """That is not the answer of a machine without GPUs."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert count_devices() is None


def test_a_lost_gpu_is_reported_with_nvidias_message(nvidia_smi):
    """A line that is no GPU is the reason."""
    nvidia_smi(LISTED)
    assert list_gpus()[1] == Gpu("1", "GPU-bb", 81_559, 4, 30)
    nvidia_smi(LISTED + "2, GPU-cc, [Unknown Error], [Unknown Error], [N/A]")
    with pytest.raises(
        ValueError, match=r"^2, GPU-cc, \[Unknown Error\], \[Unknown Error\], \[N/A\]$"
    ):
        list_gpus()

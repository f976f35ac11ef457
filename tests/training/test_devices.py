"""Steps on a device that is not the CPU, where no tensor may meet one of the CPU."""

import os
import subprocess
import sys

import pytest
import records_batch as batch
import torch
from project import ROOT


@pytest.mark.differs  # the edited history is none that the template writes
def test_steps_on_another_device_are_those_on_the_cpu(random_model, tmp_path):
    command = [sys.executable, ROOT / "tests/other_device.py", random_model, tmp_path, *batch.ON_A_DEVICE]
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True)
    for case, changes in batch.ON_A_DEVICE.items():
        expected = batch.train(random_model, tmp_path / f"{case} here", **changes)["gradients"]
        assert batch.distance(torch.load(tmp_path / f"{case}.pt"), expected) < 1e-5, case

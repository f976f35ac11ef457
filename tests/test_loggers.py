"""Every metric reaches the logger that `report_to` names: here TensorBoard."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_first_batch import recipe_file

ROOT = Path(__file__).resolve().parents[1]
METRICS = ("turns/mean", "rewards/exact_match_reward_func/mean", "tools/call_frequency", "stop/answered",
           "credit/frac_groups_without_signal", "tokens/text_differ")  # fmt: skip
# Each prints the names of the metrics that the logger has kept.
READ = {
    "tensorboard": """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from pathlib import Path
events = EventAccumulator(str(next(Path("{out}").rglob("events.out.tfevents*")).parent))
events.Reload()
print("\\n".join(events.Tags()["scalars"]))
""",
}


@pytest.fixture
def packages(request, tmp_path):
    """The logger, installed beside the environment."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(tmp_path / "packages"), request.param]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{request.param} cannot be installed: {done.stderr[-300:]}")
    return request.param, tmp_path / "packages"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("packages", READ, indirect=True)
def test_a_logger_keeps_every_metric(packages, tmp_path):
    name, folder = packages
    recipe = recipe_file(tmp_path, max_steps=2, save_strategy="no", report_to=name)
    # Behind the environment's own packages, of which it brings others along.
    code = f"import sys; sys.path.append({str(folder)!r}); import mt_grpo_trainer; mt_grpo_trainer.main(sys.argv[1:])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, "--config", recipe], cwd=ROOT, env=environment,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    read = f"import sys; sys.path.append({str(folder)!r})\n" + READ[name].format(out=tmp_path / "out")
    kept = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True)
    assert kept.returncode == 0, kept.stderr[-2000:]
    missing = [metric for metric in METRICS if metric not in kept.stdout]
    assert not missing, kept.stdout

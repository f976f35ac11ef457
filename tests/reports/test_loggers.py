"""Every metric and the table of completions reach the loggers of `report_to`: each for real, without a network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_first_batch import recipe_file

ROOT = Path(__file__).resolve().parents[2]
# Each prints what the logger has kept, and `TABLES` with the number of tables of completions.
READ = {
    "tensorboard": """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from pathlib import Path
events = EventAccumulator(str(next(Path("{out}").rglob("events.out.tfevents*")).parent))
events.Reload()
print("\\n".join(events.Tags()["scalars"]), "TABLES 0")
""",
    "wandb": """
from pathlib import Path
(run,) = Path("{out}").rglob("*.wandb")  # records in protobuf, with names as text
tables = [path for path in Path("{out}").rglob("completions*.table.json")]
assert all("What is" in path.read_text() for path in tables)
print(run.read_bytes().decode(errors="replace"), "TABLES", len({{path.name.split("_")[-1] for path in tables}}))
""",
    "trackio": """
import sqlite3
from pathlib import Path
(path,) = Path("{out}").rglob("*.db")
rows = [row for (row,) in sqlite3.connect(path).execute("SELECT metrics FROM metrics")]
rows = [row.decode() if isinstance(row, bytes) else row for row in rows]
print("\\n".join(rows), "TABLES", len({{row for row in rows if '"completions"' in row and "What is" in row}}))
""",
}
TABLES = {"tensorboard": 0, "wandb": 2, "trackio": 2}  # TensorBoard has no tables


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
    recipe = recipe_file(tmp_path, max_steps=2, save_strategy="no", report_to=name, log_completions=True)
    out = tmp_path / "out"
    # Behind the environment's own packages, of which it brings others along.
    code = f"import sys; sys.path.append({str(folder)!r}); import mt_grpo_trainer; mt_grpo_trainer.main(sys.argv[1:])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "offline", "WANDB_DIR": str(out),
                   "TRACKIO_DIR": str(out / "trackio")}  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code, "--config", recipe], cwd=ROOT, env=environment,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    read = f"import sys; sys.path.append({str(folder)!r})\n" + READ[name].format(out=out)
    kept = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True)
    assert kept.returncode == 0, kept.stderr[-2000:]
    first = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    metrics = [metric for metric, value in first.items() if value is not None and metric not in ("step", "epoch")]
    assert len(metrics) > 50 and "turns/mean" in metrics
    missing = [metric for metric in metrics if f"train/{metric}" not in kept.stdout]
    assert not missing and kept.stdout.rstrip().endswith(f"TABLES {TABLES[name]}"), kept.stdout

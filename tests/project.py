"""The project's folder, and what a run has written into its own."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Of every run that a test makes in its own process.
SMALL = dict(
    use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", disable_tqdm=True, save_strategy="no",
    logging_steps=1,
)  # fmt: skip


def json_lines(path) -> list[dict]:
    """The rows of a file that has a line of JSON for each."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def steps_of(folder) -> list[dict]:
    """The metrics of each logged step, by the state that a run leaves in its folder or in a checkpoint."""
    history = json.loads((Path(folder) / "trainer_state.json").read_text())["log_history"]
    return [row for row in history if "reward" in row]


def trained(recipe: str, folder, *arguments) -> list[dict]:
    """The metrics of each step of a recipe, which is trained in this process."""
    import mt_grpo_trainer

    words = ["--config", recipe, "--output_dir", folder, "--disable_tqdm", "true", *arguments]
    mt_grpo_trainer.main([str(word) for word in words])
    return steps_of(folder)

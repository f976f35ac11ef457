"""The last lines of a run: whether it still learned, where its output is, its curves, and the next command."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from mt_grpo.reports.troubles import troubles_at_end
from mt_grpo.run.trainer import ResumableTrainer

# What an evaluation takes from a run, next to what it was trained on.
OF_A_CONVERSATION = frozenset(
    "max_env_steps max_completion_length max_turn_tokens max_tool_response_tokens tool_timeout tool_format "
    "isolate_tools environment_timeout temperature top_p top_k min_p repetition_penalty "
    "generation_kwargs trust_remote_code attn_implementation reward_timeout chat_template_kwargs "
    "turn_reward_weights outcome_reward_weights use_peft dtype".split()
)


def say_last_lines(trainer: ResumableTrainer, script_args: Any, argv: list[str] | None) -> None:
    """Print the last lines on rank 0, after training. `argv`: the arguments of the run; None: of the process."""
    if not trainer.accelerator.is_main_process:
        return
    found = troubles_at_end(trainer.state.log_history, trainer.reward_functions.main_outcome)
    argv = sys.argv[1:] if argv is None else argv
    told = [f"Step {trainer.state.global_step}, {trouble.name}: {trouble.text}" for trouble in found]
    print("\n".join(["", *told, *last_lines(trainer.args, script_args, argv)]), flush=True)


def last_lines(args: Any, script_args: Any, argv: list[str]) -> list[str]:
    """The output folder of a run, the command that shows its curves, and the command that comes next.

    >>> from types import SimpleNamespace as S
    >>> for line in last_lines(S(output_dir="/runs/a b"), S(dataset_name="chain"),
    ...                        ["--config", "x.yaml", "--max_env_steps", "6", "--max_staleness", "1"]):
    ...     print(line)
    output    /runs/a b
    curves    python scripts/view_rollouts.py '/runs/a b'
    evaluate  python scripts/evaluate.py --config x.yaml --model '/runs/a b' --max_env_steps 6
    """
    folder = str(args.output_dir).removeprefix(f"{Path.cwd()}/")
    scripts = Path("scripts") if Path("scripts/view_rollouts.py").is_file() else Path(__file__).parents[2] / "scripts"
    lines = [f"output    {folder}", f"curves    python {scripts}/view_rollouts.py {shlex.quote(folder)}"]
    recipe = recipe_of(argv)
    if recipe is not None and has_test_rows(script_args):
        command = f"python {scripts}/evaluate.py --config {shlex.quote(recipe)} --model {shlex.quote(folder)}"
        keys = vars(script_args).keys() - {"preflight"}
        command = " ".join([command, *map(shlex.quote, overrides(argv, keys))])
        lines.append(f"evaluate  {command}")
    return lines


def recipe_of(argv: list[str]) -> str | None:
    """The recipe's path.

    >>> recipe_of(["--max_steps", "2", "--config=x.yaml"]), recipe_of(["--config", "x.yaml"]), recipe_of([])
    ('x.yaml', 'x.yaml', None)
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    return parser.parse_known_args(argv)[0].config


def overrides(argv: list[str], data_keys: set[str]) -> list[str]:
    """The arguments that an evaluation takes, too: those of the conversation, and of what it is about.

    >>> overrides(["--config=x.yaml", "--seed", "3", "--dataset-name=gsm8k", "--top_p", "1"], {"dataset_name"})
    ['--dataset-name=gsm8k', '--top_p', '1']
    """
    kept: list[str] = []
    taken = False
    for word in argv:
        if word.startswith("--"):
            key = word[2:].partition("=")[0].replace("-", "_")
            taken = key in OF_A_CONVERSATION or key in data_keys
        kept += [word] if taken else []
    return kept


def has_test_rows(script_args: Any) -> bool:
    """Whether an evaluation finds rows. A folder may have none for it."""
    name, split = script_args.dataset_name, script_args.dataset_test_split.partition("[")[0]
    folder = Path(name) if name else None
    return folder is None or not folder.is_dir() or (folder / f"{split}.jsonl").is_file()

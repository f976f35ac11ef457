"""Draw the curves of a run, or of several: rewards, stop reasons, tools, lengths, training signal, seconds.

    python scripts/plot_run.py runs/chain-sparse                    # writes runs/chain-sparse/curves.png
    python scripts/plot_run.py runs/a runs/b --output compared.png  # the second one dashed

The metrics are those of `metrics.jsonl`, which a run writes while it goes on, or else of `trainer_state.json`.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from bench.common import pyplot, save_picture
from viewer.metrics import read_metrics

from mt_grpo.reports.progress import METRICS_FILE

STYLES = ("-", "--", ":", "-.")  # of the runs
WIDTHS = (3.2, 1.8, 1.2)  # of a panel's first lines, so that one with the same values is seen under the next
SMALLEST, ALWAYS_DRAWN = 0.01, "(eval_)?reward|sampling"  # other lines that never exceed SMALLEST are not drawn
# Panels: title, then metrics with labels. Names with * stand for all that match.
PANELS = (
    ("Rewards", (("reward", "total reward"), ("rewards/*/mean", "{}"))),
    ("Stop reasons", (("stop/*", "{}"),)),
    ("Tools", (("tools/failure_frequency", "failed calls"), ("tools/malformed_frequency", "invalid calls"),
               ("tools/timeout_frequency", "calls that timed out"), ("tools/call_frequency", "calls per rollout"))),
    ("Tokens per rollout", (("completions/mean_length", "sampled"),
                            ("completions/mean_total_length", "sampled and read"))),
    ("Training signal", (("credit/frac_groups_without_signal", "groups without signal"), ("entropy", "entropy"),
                         ("completions/clipped_ratio", "truncated"))),
    ("Seconds", (("step_time", "step"), ("rollout/wait_seconds", "rollouts"), ("sync/seconds", "weight sync"))),
)  # fmt: skip


def read_run(folder: Path) -> list[dict[str, Any]]:
    """The logs of training steps. Raises `ValueError` where there are none."""
    logs = [row for row in read_metrics(folder) if "reward" in row]
    if not logs:
        raise ValueError(
            f"{folder} has no {METRICS_FILE} with a step that has a reward. Expected the output_dir of a run."
        )
    return logs


def lines_of(logs: list[dict[str, Any]], metrics: tuple[tuple[str, str], ...]) -> dict[str, tuple[list, list]]:
    """Label -> (steps, values) of a panel, without lines that have no value and shares that stay near 0.

    >>> logs = [{"step": 1, "stop/answered": 0.5, "stop/max_turns": 0.0}, {"step": 2, "stop/answered": 0.9}]
    >>> lines_of(logs, (("stop/*", "{}"),))
    {'answered': ([1, 2], [0.5, 0.9])}
    """
    lines: dict[str, tuple[list, list]] = {}
    for name, label in metrics:
        pattern = re.compile(re.escape(name).replace(r"\*", "(.+)"))
        for key in dict.fromkeys(key for row in logs for key in row):
            found = pattern.fullmatch(key)
            if not found:
                continue
            points = [(row["step"], row[key]) for row in logs if isinstance(row.get(key), (int, float))]
            points = [(step, value) for step, value in points if value == value]
            if points and (re.match(ALWAYS_DRAWN, name) or max(abs(value) for _, value in points) > SMALLEST):
                text = label.format(*found.groups()).removesuffix("_reward_func")
                lines[text] = ([step for step, _ in points], [value for _, value in points])
    return lines


def draw_runs(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw an image of six panels. A label has one colour in all runs, and a run one style of line."""
    plt = pyplot()
    figure, axes = plt.subplots(2, 3, figsize=(12, 6.4))
    for axis, (title, metrics) in zip(axes.flat, PANELS, strict=True):
        colours: dict[str, str] = {}
        for logs, style in zip(runs.values(), STYLES):
            for label, (steps, values) in lines_of(logs, metrics).items():
                shown = None if label in colours else label
                colour = colours.setdefault(label, f"C{len(colours) % 10}")
                width = WIDTHS[min(list(colours).index(label), len(WIDTHS) - 1)]
                marker = "." if len(steps) < 10 else None
                axis.plot(steps, values, style, color=colour, label=shown, linewidth=width, marker=marker)
        axis.set_title(title)
        axis.set_xlabel("optimizer step")
        if colours:
            axis.legend(fontsize=8)
    drawn = {"-": "solid", "--": "dashed", ":": "dotted", "-.": "dash-dotted"}
    names = [f"{name} ({drawn[style]})" if len(runs) > 1 else name for name, style in zip(runs, STYLES)]
    figure.suptitle("   ".join(names))
    save_picture(figure, path)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help=f"output directories, at most {len(STYLES)}")
    parser.add_argument("--output", type=Path, help="the image; by default curves.png in the first run's folder")
    args = parser.parse_args(argv)
    if len(args.runs) > len(STYLES):
        sys.exit(f"error: got {len(args.runs)} runs, expected at most {len(STYLES)}, one style of line for each.")
    output = args.output or args.runs[0] / "curves.png"
    try:
        draw_runs({str(run): read_run(run) for run in args.runs}, output)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(output)


if __name__ == "__main__":
    main()

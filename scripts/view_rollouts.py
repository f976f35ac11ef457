"""View the rollouts of a run, or of two: groups, curves, a list with filters, conversations token by token.

    python scripts/view_rollouts.py runs/chain-sparse             # serves it on http://127.0.0.1:8020
    python scripts/view_rollouts.py runs/a runs/b                 # the curves of the second one are dashed
    python scripts/view_rollouts.py runs/chain-sparse --html page.html

The page follows a running job, and shows the newest 200 MB of its log (docs/rollouts.md). `log_rollouts` sets how many
rollouts of a batch are logged, and with `log_rollout_tokens: true` each token has its own colour. `--html` writes one
file of the last 2,000 rollouts at most, which loads nothing from elsewhere. Everything that models, tools and data
say is shown as text: the page has a policy by which a browser runs no script but its own.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import html
import itertools
import json
import math
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from string import Template
from typing import Any

from aiohttp import web
from viewer.log import LogReader

from mt_grpo.base.errors import error_line
from mt_grpo.images.pictures import ID_DIGITS
from mt_grpo.reports.progress import METRICS_FILE, evaluation_prefix
from mt_grpo.reports.rollout_log import IMAGE_FOLDER

PARTS = Path(__file__).resolve().parent / "viewer"
MOST_ROLLOUTS = 2000  # of a page in one file
MOST_IMAGE_BYTES = 20 * 2**20  # of the images in one file
SMALLEST, ALWAYS_DRAWN = 0.01, "(eval_.*)?reward|sampling"  # other lines that never exceed SMALLEST are not drawn
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
    ("Turns per rollout", (("turns/mean", "mean"), ("turns/max", "maximum"))),
    ("Weights and logprobs", (("rollout/staleness", "staleness"),
                              ("sampling/sampling_logp_difference/mean", "logprob difference"))),
)  # fmt: skip
BY_DEPTH = {"logp_difference": "Logprob difference", "importance_ratio": "Importance ratio", "entropy": "Entropy"}
EVALUATION = ("Evaluation", (("eval_*reward", "{} total reward"), ("eval_*rewards/*/mean", "{} {}")))


# -- the page --


def page(data: dict[str, Any], title: str, images: str = "data:") -> str:
    """One page of HTML with its style, its script and `data`.

    `images` says where images may come from.

    INVARIANT: a browser runs the script whose hash stands in the page's policy, and nothing that `data` says.
    """
    style, script = ((PARTS / name).read_text(encoding="utf-8") for name in ("style.css", "viewer.js"))
    digests = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in (style, script))
    of_style, of_script = (f"'sha256-{digest}'" for digest in digests)  # how a policy names what is inline
    policy = (
        f"default-src 'none'; script-src {of_script}; style-src {of_style}; img-src {images}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # which cannot end the element around it
    filled = {"policy": policy, "title": html.escape(title), "style": style, "script": script, "data": text}
    return Template((PARTS / "page.html").read_text(encoding="utf-8")).substitute(filled)


# -- curves --


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The logs of a run in an output directory, by step. Steps that a resumed run trained again count once, the later.

    A line that is not JSON is left out.
    """
    logs: list[Any] = []
    with suppress(OSError), open(folder / METRICS_FILE, encoding="utf-8", errors="replace") as file:
        for line in file:
            with suppress(ValueError):
                logs.append(json.loads(line, parse_constant=lambda name: None))  # NaN and infinities
    rows, first = {}, math.inf
    for row in reversed(logs):
        # A resumed run gave up the later ones.
        if isinstance(row, dict) and isinstance(row.get("step"), int) and row["step"] <= first:
            rows.setdefault((row["step"], evaluation_prefix(row) or ("reward" if "reward" in row else "")), row)
            first = row["step"] if "reward" in row else first
    return [rows[key] for key in sorted(rows)]


def lines_of(logs: list[dict[str, Any]], metrics: tuple[tuple[str, str], ...]) -> dict[str, list[list]]:
    """Label -> [step, value] points of a panel, without lines that have no value and shares that stay near 0."""
    lines: dict[str, list[list]] = {}
    for name, label in metrics:
        pattern = re.compile(re.escape(name).replace(r"\*", "(.*)"))
        for key in dict.fromkeys(key for row in logs for key in row):
            found = pattern.fullmatch(key)
            values = [(row["step"], row.get(key)) for row in logs] if found else []
            numbers = [(step, value) for step, value in values if isinstance(value, (int, float)) and value == value]
            if numbers and (re.match(ALWAYS_DRAWN, name) or max(abs(value) for _, value in numbers) > SMALLEST):
                text = label.format(*found.groups()).removesuffix("_reward_func").replace("_ ", ": ")
                lines[text.strip()] = [[step, float(f"{value:.6g}")] for step, value in numbers]
    return lines


class Run:
    """One output directory: its rollouts, and its metrics. Raises `ValueError` where nothing of a run is in it."""

    def __init__(self, folder: Path):
        self.folder = folder
        if not any(folder.glob("rollouts.rank*")) and not read_metrics(folder):
            words = "Expected the output_dir of a run with log_rollouts above 0."
            raise ValueError(f"{folder} has neither rollouts.rank*.jsonl nor {METRICS_FILE}. {words}")
        self.log = LogReader(folder)
        self.name = folder.resolve().name

    def image(self, name: str) -> Path:
        """The file of an image of the log."""
        return self.folder / IMAGE_FOLDER / f"{name}.png"

    def info(self) -> dict[str, Any]:
        """Read what was added to the log, and return numbers of it."""
        try:
            self.log.refresh()
            problems = []
        except OSError as error:
            problems = [f"{self.folder}: {error_line(error)}. What was read before is shown."]
        path, info = self.folder / METRICS_FILE, self.log.info()
        size = path.stat().st_size if path.is_file() else 0
        return {"name": self.name, "metrics": size, **info, "notes": info["notes"] + problems}

    def read(self) -> None:
        """Read the log for the first time, and print how much it is."""
        began = time.perf_counter()
        info = self.info()
        head = f"{self.folder}: {info['count']:,} rollouts, read in {time.perf_counter() - began:.1f} s"
        print("\n".join([head, *info["notes"]]), flush=True)


def open_runs(folders: list[Path]) -> list[Run]:
    """The runs, with names that tell them apart. Raises `ValueError`."""
    runs = [Run(folder) for folder in folders]
    if len({run.name for run in runs}) < len(runs):
        for run in runs:
            run.name = f"{run.folder.resolve().parent.name}/{run.name}"
    return runs


def curves(runs: list[Run]) -> dict[str, Any]:
    """The panels of curves of these runs, of their logged training steps and evaluations."""
    logs, panels = [read_metrics(run.folder) for run in runs], []
    for title, metrics in (*PANELS, EVALUATION):
        is_test = title == EVALUATION[0]
        shown = [[row for row in rows if (evaluation_prefix(row) if is_test else "reward" in row)] for rows in logs]
        lines = [
            {"label": label, "run": number, "points": points}
            for number, rows in enumerate(shown)
            for label, points in lines_of(rows, metrics).items()
        ]
        if lines:
            panels.append({"title": title, "lines": lines, "mode": "eval_" * is_test})
    for axis, (name, title) in itertools.product(("turn", "depth"), BY_DEPTH.items()):
        lines = []
        for number, rows in enumerate(logs):
            there = [row[key] for row in rows if isinstance(row.get(key := f"by_{axis}/{name}"), list)]
            for label, values in zip(("first log", "last log"), there[:1] + there[1:][-1:]):
                points = [[k, value] for k, value in enumerate(values) if isinstance(value, (int, float))]
                lines += [{"label": label, "run": number, "points": points}] if len(points) > 1 else []
        if lines:
            panels.append({"title": f"{title} by {axis}", "lines": lines, "mode": "", "axis": axis})
    missing = ", ".join(run.name for run, rows in zip(runs, logs) if not rows)
    return {"panels": panels, "note": missing and f"{missing}: there is no {METRICS_FILE}, so there are no curves."}


# -- one file --


def write_page(folders: list[Path], path: Path) -> str:
    """Write the page in one file; returns words that say what is in it."""
    runs = open_runs(folders)
    data: dict[str, Any] = {"served": False, "runs": [], "rollouts": [], "images": {}}
    for number, run in enumerate(runs):
        run.read()
        by_step = sorted(run.log.rollouts, key=lambda each: run.log.rollouts[each].line["step"])
        chosen = by_step[-(MOST_ROLLOUTS // len(runs)) :]
        which = "all" if chosen == by_step else f"the newest {len(chosen):,} of"
        data["runs"].append({**run.info(), "which": f"{run.name}: {which} {len(by_step):,} rollouts"})
        rollouts = [{**run.log.rollout(each), "run": number, "words": run.log.rollouts[each].words} for each in chosen]
        data["rollouts"] += rollouts
        most = MOST_IMAGE_BYTES // len(runs)
        for name in dict.fromkeys(str(each["name"]) for item in rollouts for each in item["row"].get("images") or []):
            file = run.image(name)
            if re.fullmatch(f"[0-9a-f]{{{ID_DIGITS}}}", name) and file.is_file() and file.stat().st_size <= most:
                image = file.read_bytes()
                most -= len(image)
                data["images"][name] = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    data["panels"] = curves(runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(data, " and ".join(run.name for run in runs)), encoding="utf-8")
    return "; ".join(run["which"] for run in data["runs"])


# -- a server --


class Viewer:
    """Answers the page's questions, one at a time; the page asks for `info`, which reads on in the logs, every 3 s."""

    def __init__(self, folders: list[Path]):
        self.runs = open_runs(folders)
        for run in self.runs:
            run.read()
        self.ask = ThreadPoolExecutor(1)
        self.title = " and ".join(run.name for run in self.runs)

    def app(self) -> web.Application:
        """The application."""
        app = web.Application(middlewares=[self.guard])
        routes = {
            "/": self.page,
            rf"/api/image/{{run:\d+}}/{{name:[0-9a-f]{{{ID_DIGITS}}}}}": self.image,
            "/api/info": self.answer(lambda request: {"runs": [run.info() for run in self.runs]}),
            "/api/panels": self.answer(lambda request: curves(self.runs)),
            r"/api/rollouts/{run:\d+}": self.answer(lambda request: self.log_of(request).table(dict(request.query))),
            r"/api/rollout/{run:\d+}/{id:\d+}": self.answer(lambda r: self.log_of(r).rollout(int(r.match_info["id"]))),
            r"/api/group/{run:\d+}/{id:\d+}": self.answer(lambda r: self.log_of(r).group(int(r.match_info["id"]))),
        }
        app.add_routes([web.get(path, handler) for path, handler in routes.items()])
        return app

    @web.middleware
    async def guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Answer only to the addresses of this machine: another page may have its own name resolve to it."""
        name = request.host.rpartition(":")[0] or request.host
        if name not in ("127.0.0.1", "localhost", "[::1]"):
            return web.json_response({"error": f"The host is {name}, expected 127.0.0.1 or localhost."}, status=403)
        response = await handler(request)
        response.headers.update({"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"})
        return response

    async def page(self, request: web.Request) -> web.Response:
        """The page."""
        return web.Response(text=page({"served": True}, self.title, "data: 'self'"), content_type="text/html")

    async def image(self, request: web.Request) -> web.StreamResponse:
        """An image that a run's rollouts read. Its name is of a digest, and so no other file's."""
        number = int(request.match_info["run"][:6])
        path = self.runs[number].image(request.match_info["name"]) if number < len(self.runs) else None
        if path is None or not path.is_file():
            return web.json_response({"error": "There is no such image."}, status=404)
        return web.FileResponse(path, headers={"Content-Type": "image/png"})

    def answer(self, function: Any) -> Any:
        """A handler that runs in the asking thread. Bad questions get status 400 with what was expected."""

        async def handler(request: web.Request) -> web.Response:
            try:
                found = await asyncio.get_running_loop().run_in_executor(self.ask, function, request)
            except (ValueError, KeyError, OverflowError, TypeError) as error:  # TypeError: a column that has no order
                return web.json_response({"error": f"{error}".strip("'\"")}, status=400)
            return web.json_response(found)

        return handler

    def log_of(self, request: web.Request) -> LogReader:
        """The log of the run that a question is about. Raises `ValueError`."""
        number = int(request.match_info["run"])
        if number >= len(self.runs):
            raise ValueError(f"There is no run {number}. Expected 0 to {len(self.runs) - 1}.")
        return self.runs[number].log


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="output directories, one or two")
    parser.add_argument("--html", type=Path, help="write one page to this file, and end")
    parser.add_argument("--port", type=int, default=8020, choices=range(1, 2**16), metavar="PORT")
    args = parser.parse_args(argv)
    if len(args.runs) > 2:
        sys.exit(f"error: got {len(args.runs)} runs, expected one, or two to compare.")
    try:
        if args.html:
            which = write_page(args.runs, args.html)
            print(f"{args.html}: {which}, {args.html.stat().st_size / 1e6:.1f} MB")
            return
        viewer = Viewer(args.runs)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    said = f"{viewer.title} is served on http://127.0.0.1:{args.port} (Ctrl+C ends it)"
    web.run_app(viewer.app(), host="127.0.0.1", port=args.port, print=lambda *_, **__: print(said, flush=True))


if __name__ == "__main__":
    main()

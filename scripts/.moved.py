"""What stands behind the old name of each script that has moved: an error that says where the script is now."""

import sys
from pathlib import Path

MOVED = {
    **{f"bench_{name}": f"bench/{name}.py"
       for name in ("agents", "bf16", "common", "credit", "gpu", "overlap", "rollout", "step", "sync", "tails")},
    **{f"build_{name}_model": f"build/{name}.py" for name in ("chain", "gym", "search", "tiny", "tools")},
    **{name: f"bench/{name}.py" for name in ("fault_proxy", "soak", "template_table")},
    **{name: f"launch/{name}.py" for name in ("keeper", "launch_plan", "serve", "train")},
    "rollout_index": "viewer/index.py", "serve_plan": "launch/launch_plan.py",
}  # fmt: skip
OLD, NEW = (f"scripts/{name}" for name in (f"{Path(__file__).stem}.py", MOVED.get(Path(__file__).stem)))


def __getattr__(name: str) -> None:  # of `from bench_common import ...`
    if name.startswith("__"):
        raise AttributeError(name)
    module = NEW.removeprefix("scripts/").removesuffix(".py").replace("/", ".")
    raise ImportError(f"{OLD} is now {NEW}. Import {name} from {module}.")


if __name__ == "__main__":
    print(f"error: {OLD} is now {NEW}. Run: python {' '.join([NEW, *sys.argv[1:]])}", file=sys.stderr)
    sys.exit(2)

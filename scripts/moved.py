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

if __name__ == "__main__":
    name = Path(__file__).stem
    if name not in MOVED:
        sys.exit(__doc__)
    new = f"scripts/{MOVED[name]}"
    command = " ".join(["python", new, *sys.argv[1:]])
    print(f"error: scripts/{name}.py is now {new}. Run: {command}", file=sys.stderr)
    sys.exit(2)

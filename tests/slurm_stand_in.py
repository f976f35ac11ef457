"""Stand-ins for `srun` and `scontrol`, by the name that this file is started under. Tasks are processes here.

`srun` starts as many as --ntasks says, with SLURM_NODEID and SLURM_PROCID, passes SIGTERM on to them, and with
--kill-on-bad-exit ends the others behind the first that fails. `scontrol show hostnames` prints the names of a list
that are separated by commas; `scontrol requeue` writes the job's number into the file $REQUEUED.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

FLAGS = {"--overlap"}  # the other options are all of the form --name=value


def srun(arguments: list[str]) -> int:
    options = {}
    while arguments[0].startswith("--"):
        name, _, value = arguments.pop(0).partition("=")
        assert value or name in FLAGS, name
        options[name] = value
    count, names = int(options["--ntasks"]), options["--nodelist"].split(",")
    assert count == int(options["--nodes"]) == len(names), options
    tasks = []
    for rank in range(count):
        of_task = {"SLURM_NODEID": str(rank), "SLURM_PROCID": str(rank), "SLURMD_NODENAME": names[rank]}
        tasks.append(subprocess.Popen(arguments, env={**os.environ, **of_task}, start_new_session=True))

    def send(number, frame=None):
        for task in tasks:
            if task.poll() is None:
                task.send_signal(number)

    signal.signal(signal.SIGTERM, send)
    while any(task.poll() is None for task in tasks):
        failed = any(task.returncode for task in tasks)
        if failed and options.get("--kill-on-bad-exit") == "1":
            time.sleep(1.0)
            send(signal.SIGTERM)
            time.sleep(2.0)
            send(signal.SIGKILL)
        time.sleep(0.05)
    codes = [task.returncode for task in tasks]
    return max(code if code >= 0 else 128 - code for code in codes)


def scontrol(arguments: list[str]) -> int:
    if arguments[:2] == ["show", "hostnames"]:
        print("\n".join(arguments[2].split(",")))
    elif arguments[0] == "requeue":
        Path(os.environ["REQUEUED"]).write_text(arguments[1])
    else:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit({"srun": srun, "scontrol": scontrol}[Path(sys.argv[0]).name](sys.argv[1:]))

"""Stand-ins for commands of Slurm, by the name that this file is started under. Tasks are processes here.

They do what a Slurm 22.05 did. The folder $STEPS has a file for each step that runs: its name, in a file that has the
step's number as its name. The processes of a step are those with this folder and number in their environment.

srun        starts as many tasks as --ntasks says. SIGTERM does not reach them: it kills all processes of the step.
            With --kill-on-bad-exit the first task that fails ends the others: by SIGTERM, and 30 s later by SIGKILL.
            A step has the GPUs that --gpus-per-node says.
squeue      prints the steps. Where $STEPS/busy is there, it fails once, as if the controller did not answer.
scancel     sends a signal to all processes of a step.
scontrol    `show hostnames` prints the names of a list that are separated by commas; `requeue` writes the job's number
            into the file $REQUEUED, and sends SIGTERM to the script.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

FLAGS = {"--overlap"}  # the other options are all of the form --name=value
KILL_WAIT = 30.0
STEPS = Path(os.environ.get("STEPS", ""))


def send(step: str, number: int) -> int:
    """Send a signal to all processes of a step; returns how many there are."""
    wanted = {f"STEPS={STEPS}".encode(), f"SLURM_STEP_ID={step}".encode()}
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if wanted <= set((process / "environ").read_bytes().split(b"\0")):
                os.kill(int(process.name), number)
                count += 1
        except OSError:  # it has ended, or is another user's
            pass
    return count


def srun(arguments: list[str]) -> int:
    options = {}
    while arguments[0].startswith("--"):
        name, _, value = arguments.pop(0).partition("=")
        assert value or name in FLAGS, name
        options[name] = value
    count, names = int(options["--ntasks"]), options["--nodelist"].split(",")
    assert count == int(options["--nodes"]) == len(names), options
    step = next(number for number in map(str, range(100)) if claim(number, options["--job-name"]))

    killed = []

    def kill(number, frame):
        print("srun: forcing job termination", file=sys.stderr, flush=True)
        killed.append(number)
        while send(step, signal.SIGKILL):
            time.sleep(0.02)

    signal.signal(signal.SIGTERM, kill)
    gpus = ",".join(map(str, range(int(options.get("--gpus-per-node", 0)))))
    tasks = []
    for rank in range(count):
        of_task = {"SLURM_NODEID": str(rank), "SLURM_PROCID": str(rank), "SLURMD_NODENAME": names[rank]}
        of_task |= {"SLURM_STEP_ID": step, "CUDA_VISIBLE_DEVICES": gpus}
        tasks.append(subprocess.Popen(arguments, env={**os.environ, **of_task}, start_new_session=True))
    failed = None
    while any([task.poll() is None for task in tasks]):
        if killed:  # a task that was just being started did not say yet of which step it is
            send(step, signal.SIGKILL)
        if failed is None and any(task.returncode for task in tasks) and options.get("--kill-on-bad-exit") == "1":
            failed = time.monotonic()
            send(step, signal.SIGTERM)
        if failed is not None and time.monotonic() > failed + KILL_WAIT:
            send(step, signal.SIGKILL)
        time.sleep(0.05)
    send(step, signal.SIGKILL)  # what a task left behind
    (STEPS / step).unlink()
    codes = [task.returncode for task in tasks]
    return max(code if code >= 0 else 128 - code for code in codes)


def claim(step: str, name: str) -> bool:
    """Whether this step's number was free."""
    try:
        with open(STEPS / step, "x") as file:
            file.write(name)
    except FileExistsError:
        return False
    return True


def squeue(arguments: list[str]) -> int:
    job = os.environ["SLURM_JOB_ID"]
    assert arguments == ["--steps", "--noheader", "--jobs", job, "--format", "%i %j"], arguments
    if (STEPS / "busy").exists():
        (STEPS / "busy").unlink()
        print("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", file=sys.stderr)
        return 1
    for step in sorted(STEPS.glob("[0-9]*")):
        print(f"{job}.{step.name} {step.read_text()}")
    print(f"{job}.batch batch")
    return 0


def scancel(arguments: list[str]) -> int:
    *options, target = arguments
    assert options == ["--ctld", "--signal=TERM"], options
    job, _, step = target.partition(".")
    if job != os.environ["SLURM_JOB_ID"] or not (STEPS / step).exists():
        print(f"scancel: error: Kill job error on job step id {target}: Invalid job id specified", file=sys.stderr)
        return 1
    send(step, signal.SIGTERM)
    return 0


def scontrol(arguments: list[str]) -> int:
    if arguments[:2] == ["show", "hostnames"]:
        print("\n".join(arguments[2].split(",")))
    elif arguments[0] == "requeue":
        Path(os.environ["REQUEUED"]).write_text(arguments[1])
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(0.2)
    else:
        return 1
    return 0


COMMANDS = {"srun": srun, "squeue": squeue, "scancel": scancel, "scontrol": scontrol}

if __name__ == "__main__":
    sys.exit(COMMANDS[Path(sys.argv[0]).name](sys.argv[1:]))

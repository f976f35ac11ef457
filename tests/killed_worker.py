"""A run that is killed at its sixth step, and notes the prompts of each finished one: see `killed_and_resumed`.

The environment variable KILLED says where: in rollouts, in the optimizer step, while saving, or between steps.
"""

import json
import os
import signal
import subprocess
import sys

import warm_python
from project import ROOT, json_lines, steps_of

PLACES = {"optimizer step": ("_get_grad_norm", 5), "save": ("_save_rng_state", 6), "between steps": ("log", 5)}


def killed_and_resumed(folder, place, arguments):
    """Kill a run in `folder` at this place, resume it, and return (the log, the prompts of each step)."""
    command = [warm_python.executable(), __file__, *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "NOTES": str(folder / "notes"),
           "OMP_NUM_THREADS": "1"}  # fmt: skip
    killed = subprocess.run(command, cwd=ROOT, env={**env, "KILLED": place}, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr[-3000:]
    resumed = subprocess.run([*command, "--resume_from_checkpoint", "last"], cwd=ROOT, env=env, capture_output=True,
                             text=True)  # fmt: skip
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert any(f"checkpoint-{n}, after" in resumed.stdout for n in (4, 6)[: 1 + (place == "rollouts")]), resumed.stdout
    return steps_of(folder / "out"), dict(json_lines(folder / "notes"))  # of a step the resumed run's


def work():
    import mt_grpo_trainer as m

    def patch(name, before=lambda self, *args: None, after=lambda self: None, of=m.MTGRPOEnvTrainer):
        method = getattr(of, name)

        def patched(self, *args, **kwargs):
            before(self, *args)
            result = method(self, *args, **kwargs)
            after(self)
            return result

        setattr(of, name, patched)

    def kill_at(step):
        def kill(self, *args):
            if self.state.global_step >= step:
                os.kill(os.getpid(), signal.SIGKILL)

        return kill

    def kill_in_second_turn(env, rollout, *args):  # of rollouts for a later step, it may come a step later
        if rollout.turns:
            kill_at(5)(trainers[0])

    def note(self):
        prompts = [row["prompt"][-1]["content"] for row in self.batch.rows[:: self.num_generations]]
        with open(os.environ["NOTES"], "a") as file:
            file.write(json.dumps([self.state.global_step, prompts]) + "\n")

    trainers, place = [], os.environ.get("KILLED")
    patch("train", before=lambda self, *args: trainers.append(self))
    patch("training_step", after=note)
    if place == "rollouts":
        patch("take_turn", before=kill_in_second_turn, of=m.MultiTurnToolEnv)
    elif place:
        patch(PLACES[place][0], before=kill_at(PLACES[place][1]))
    m.main(sys.argv[1:])


if __name__ == "__main__":
    work()

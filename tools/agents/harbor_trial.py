"""Harbor's tasks: an agent of Harbor works on the row's task, and the policy is its model.

    environment: openai_agent
    agent: tools/agents/harbor_trial.py:solve

A row has a column `task`, the folder of a Harbor task. Each rollout is one `Trial` of Harbor in a process of its own,
which the Python of `HARBOR_PYTHON` runs. The verifier's result is the outcome reward, and results of steps are turn
rewards. Environment variables choose the rest:

    HARBOR_PYTHON        a Python that has harbor: python3.12 -m venv harbor; harbor/bin/pip install "harbor==0.25.*"
    HARBOR_AGENT         an agent of Harbor by name, or module:Class (default terminus-2)
    HARBOR_ENVIRONMENT   docker or another type of Harbor's, or module:Class (default docker)

Needs: harbor in a virtual environment of its own, and Docker with Compose for HARBOR_ENVIRONMENT=docker.

Protects against: what Harbor's environment does. A container is apart from this machine. The verifier runs next to the
processes that the policy left, unless the task has a verifier of its own environment.
"""

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

POLICY_FAILURES = {  # what the policy did to its task; any other error is the machine's
    "RewardFileNotFoundError", "RewardFileEmptyError", "VerifierOutputParseError", "VerifierTimeoutError",
}  # fmt: skip
# PID 1 of a container: no kill of the policy ends it, and it ends at once when the container is stopped.
COMPOSE = "services:\n  main:\n    command: [sleep, infinity]\n    stop_signal: SIGKILL\n"


async def solve(row: dict[str, Any], client: Any) -> float:
    """Run the trial of a row's task. Returns the reward of its verifier, 0 if the policy left nothing to verify.

    Raises `RuntimeError` if anything else failed: the rollout then ends as `agent_error` and is not trained on.
    """
    python = os.environ.get("HARBOR_PYTHON", sys.executable)
    order = {"task": str(Path(row["task"]).resolve()), "url": str(client.base_url), "key": client.api_key}
    with tempfile.TemporaryFile() as errors:
        pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE, "stderr": errors}
        process = await asyncio.create_subprocess_exec(python, __file__, **pipes, start_new_session=True, limit=2**24)
        try:
            message: dict[str, Any] = {}
            process.stdin.write(json.dumps(order).encode() + b"\n")
            while line := await process.stdout.readline():
                message = json.loads(line)
                if "step" in message:  # the next step begins when this one has its reward
                    client.reward(message["step"])
                    process.stdin.write(b"\n")
            await process.wait()
        finally:
            process.stdin.close()  # a worker that is still running removes its environment and ends
        if "outcome" in message:
            return message["outcome"]
        errors.seek(0)
        said = message.get("failed") or errors.read()[-1000:].decode(errors="replace").strip()
        raise RuntimeError(f"the trial of {row['task']} failed: {said} (HARBOR_PYTHON={python})")


# The worker. Lines of JSON: its order, then out a "step" for each step (answered by a line), and last an "outcome" or
# "failed". The end of its input cancels the trial, also if the trainer was killed.


def number(rewards: dict[str, float] | None) -> float:
    """One number of a verifier's rewards: `reward`, otherwise their mean, 0 without any.

    >>> number({"reward": 1, "style": 0.5}), number({"a": 1, "b": 0}), number(None)
    (1.0, 0.5, 0.0)
    """
    rewards = rewards or {}
    return float(rewards["reward"] if "reward" in rewards else sum(rewards.values()) / max(len(rewards), 1))


def reward_of(result: Any) -> float:
    """The reward of a trial or of a step. Raises `RuntimeError` for an error that is not the policy's."""
    error = result.exception_info
    if error is not None and error.exception_type not in POLICY_FAILURES:
        raise RuntimeError(f"{error.exception_type}: {error.exception_message[:500]}")
    return number(result.verifier_result and result.verifier_result.rewards)


def by_name(reference: str, kind: str) -> dict[str, str]:
    """The arguments of a configuration that name something of Harbor, or a class of the user's.

    >>> by_name("terminus-2", "name"), by_name("my_agent:MyAgent", "name")
    ({'name': 'terminus-2'}, {'import_path': 'my_agent:MyAgent'})
    """
    return {"import_path" if ":" in reference else kind: reference}


async def run_trial(order: dict[str, str], ask: Any, folder: Path) -> float:
    """Run a trial. `ask` sends a step's reward, and returns when it was given. Returns the outcome reward."""
    from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
    from harbor.trial.hooks import TrialEvent
    from harbor.trial.trial import Trial

    (folder / "compose.yaml").write_text(COMPOSE)
    os.environ.update(OPENAI_API_KEY=order["key"], OPENAI_BASE_URL=order["url"])
    agent = by_name(os.environ.get("HARBOR_AGENT", "terminus-2"), "name")
    if "name" in agent:  # a class of the user's finds both in its environment
        agent |= {"base_url": order["url"], "env": {"OPENAI_API_KEY": order["key"]}}
    environment = by_name(os.environ.get("HARBOR_ENVIRONMENT", "docker"), "type")
    if environment.get("type") == "docker":
        environment["extra_docker_compose"] = [folder / "compose.yaml"]
    config = TrialConfig(
        task=TaskConfig(path=Path(order["task"])),
        trials_dir=folder,
        agent=AgentConfig(model_name="openai/policy", override_timeout_sec=1e6, **agent),
        environment=EnvironmentConfig(**environment),
    )
    trial = await Trial.create(config)
    told = 0

    async def tell(event: Any = None) -> None:
        nonlocal told
        done = (trial.result.step_results or [])[: None if event is None else -1]  # the last one has just begun
        for step in done[told:]:
            await ask({"step": reward_of(step)})
            told += 1

    trial.add_hook(TrialEvent.AGENT_START, tell)
    result = await trial.run()
    await tell()
    outcome, steps = reward_of(result), result.step_results or []
    verified = [step for step in steps if step.verifier_result is not None]
    return outcome * (len(verified) / len(steps) if steps else 1.0)  # Harbor's mean leaves out steps without a result


async def worker() -> None:
    """Run the trial of the order on standard input."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what Harbor and agents print is no message
    lines: asyncio.Queue[bytes] = asyncio.Queue()
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    async def ask(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=out)
        await lines.get()

    with tempfile.TemporaryDirectory() as folder:
        running = asyncio.create_task(run_trial(json.loads(await reader.readline()), ask, Path(folder)))

        async def listen() -> None:
            while line := await reader.readline():
                lines.put_nowait(line)
            running.cancel()

        listening = asyncio.create_task(listen())
        try:
            print(json.dumps({"outcome": await running}), file=out)
        except Exception as error:
            print(json.dumps({"failed": f"{type(error).__name__}: {error}"}), file=out)
        listening.cancel()


if __name__ == "__main__":
    # Read by litellm at its import, which otherwise fetches a list of prices; and no reports to Harbor's makers.
    os.environ.update(LITELLM_LOCAL_MODEL_COST_MAP="True", HARBOR_TELEMETRY="0")
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(worker())

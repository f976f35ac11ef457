"""`openenv_scheduler` of ms-swift: sessions that are forced to fail, and a real OpenEnv server."""

import asyncio
import json
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
from datasets import Dataset
from processes import IMPORTS
from test_ms_swift import Scripted, conversations, run, user

import mt_grpo_trainer as mt
from mt_grpo.adapters.ms_swift.gym import OpenEnvScheduler, OpenEnvWrapper
from mt_grpo.adapters.ms_swift.paths import multi_turns
from mt_grpo.base.event_loop import run_async
from mt_grpo.conversation.environments import EnvironmentFailure
from mt_grpo.recipe.data import load_rows

ROOT = Path(__file__).resolve().parents[2]


class Session:
    """Counts to the goal of its row, as a server would. `reset`, `step` and `close` block."""

    opened, closed, threads = [], [], set()

    def __init__(self, env_config):
        self.env_config, self.count, self.actions = env_config, 0, []
        self.opened.append(self)

    def reset(self):
        self.threads.add(threading.current_thread())
        return {"question": "Say 1.", **(self.env_config.get("reset_kwargs") or {})}, {"ignored": 1}

    def step(self, action):
        self.threads.add(threading.current_thread())
        self.actions.append(action)
        self.count += 1
        reward = float(action == {"answer": self.count} or action == {"message": str(self.count)})
        return {"question": f"Say {self.count + 1}."}, reward, self.count == self.env_config["goal"], None

    def close(self):
        self.closed.append(self)


class Counting(OpenEnvScheduler):
    env_config_defaults = {"goal": 2, "system_message": "Count."}

    def _create_env(self, env_config):
        return Session(env_config)

    def parse_action(self, text):
        Counting.loop_thread = threading.current_thread()
        return super().parse_action(text)


@pytest.fixture(autouse=True)
def sessions(monkeypatch):
    for name, value in (("opened", []), ("closed", []), ("threads", set())):
        monkeypatch.setattr(Session, name, value)
    return Session


def test_a_session_is_played_and_closed(sessions):
    rollout, _ = run(Counting, "1", '```json\n{"answer": 2}\n```')
    assert rollout.environment.infos == {
        "total_reward": 2.0, "step_rewards": [1.0, 1.0], "gym_done": True, "num_turns": 2
    }  # fmt: skip
    assert rollout.reward == 2.0 and [turn.reward for turn in rollout.turns] == [1.0, 1.0]
    assert rollout.prompt_messages == [{"role": "system", "content": "Count."}, user('{"question": "Say 1."}')]
    assert rollout.turns[0].observation == '{"question": "Say 2."}'
    (session,) = sessions.opened
    assert session.actions == [{"message": "1"}, {"answer": 2}] and sessions.closed == [session]
    assert Counting.loop_thread not in sessions.threads  # what blocks stalls no other conversation


def test_a_row_goes_before_the_defaults(sessions):
    row = {"env_config": {"goal": 1, "system_message": "", "reset_kwargs": {"level": 3}}}
    rollout, _ = run(Counting, "1", row=row)
    assert rollout.prompt_messages == [user('{"question": "Say 1.", "level": 3}')] and len(rollout.turns) == 1


def test_parsing_and_text_are_ones_own(sessions):
    """As the plug-in for sudoku of ms-swift's examples: two methods, and a name."""

    class Own(Counting):
        def parse_action(self, text):
            return {"answer": int(text.removeprefix("I say "))}

        def format_observation(self, observation):
            return observation["question"]

    rollout, _ = run(Own, "I say 1", "I say 2")
    assert rollout.reward == 2.0 and rollout.turns[0].observation == "Say 2."
    with pytest.raises(EnvironmentFailure, match="ValueError: invalid literal"):
        run(Own, "one")
    assert len(sessions.closed) == 2


def test_a_subclass_may_begin_and_act_itself(sessions):
    """With the attributes of ms-swift, and none of ours."""

    class Begins(OpenEnvScheduler):
        async def on_trajectory_start(self, requests):
            for request in requests:
                self._envs[request.uuid] = Session({"goal": 2})
                self._total_rewards[request.uuid], self._step_rewards[request.uuid] = 0.0, []
                request.messages = [user("Count.")]

        async def on_turn_end(self, infer_request, response_choice, current_turn):
            observation, reward, done, _ = self._envs[infer_request.uuid].step({"message": str(current_turn)})
            self._total_rewards[infer_request.uuid] += reward
            self._pending_obs[infer_request.uuid] = observation["question"]
            return {"done": done, "rollout_infos": {"total_reward": self._total_rewards[infer_request.uuid]}}

    rollout, _ = run(Begins, "a", "b")
    assert rollout.environment.infos["total_reward"] == 2.0 and rollout.turns[0].observation == "Say 2."
    assert len(sessions.closed) == 1


@pytest.mark.parametrize("method", ["_create_env", "reset", "step"])
def test_a_session_that_fails_ends_its_rollout_and_is_closed(method, sessions, monkeypatch):
    def fails(*args):
        raise ConnectionError("the server is gone")

    monkeypatch.setattr(Counting if method == "_create_env" else Session, method, fails)
    with pytest.raises(EnvironmentFailure, match="ConnectionError: the server is gone"):
        run(Counting, "1", "2")
    assert len(sessions.closed) == len(sessions.opened) == (method != "_create_env")


def test_so_many_sessions_open_at_a_time(sessions, monkeypatch):
    """The others wait for them, and then open: seven conversations with room for three."""
    room, lock, inside, most, release = 3, threading.Lock(), [0], [], threading.Event()

    def reset(self):
        with lock:
            inside[0] += 1
            most.append(inside[0])
        assert release.wait(60)
        with lock:
            inside[0] -= 1
        return {"question": "Say 1."}, None

    async def let_go():
        while len(most) < room:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)  # in which others would come in
        release.set()

    monkeypatch.setattr(Session, "reset", reset)
    monkeypatch.setattr(Counting, "max_concurrent_envs", room)
    env, llm = conversations(Counting), Scripted("1")
    prompts = [[user("What?")]] * 7
    rollouts = env.start(prompts, rows=[{"prompt": prompt} for prompt in prompts])
    run_async(mt.gather_all([let_go(), *(env.converse(rollout, llm, {}) for rollout in rollouts)]))
    assert max(most) == room and len(most) == 7 and all(rollout.error is None for rollout in rollouts)


@pytest.mark.parametrize("slow", ["_create_env", "reset"])
def test_a_session_that_opens_too_late_is_closed(slow, sessions, monkeypatch):
    """Its conversation was given up after `environment_timeout`."""
    gone, done = threading.Event(), threading.Event()
    owner = Counting if slow == "_create_env" else Session
    quick, close = getattr(owner, slow), Session.close

    def late(self, *args):
        assert gone.wait(60)
        return quick(self, *args)

    def closes(self):
        close(self)
        done.set()

    monkeypatch.setattr(owner, slow, late)
    monkeypatch.setattr(Session, "close", closes)
    with pytest.raises(EnvironmentFailure, match="environment_timeout"):
        run(Counting, "1", environment_timeout=2.0)  # time enough for its thread to begin
    done.clear()
    gone.set()
    assert done.wait(60) and sessions.closed[-1] is sessions.opened[0]


def test_keys_that_only_other_rows_have_say_nothing(sessions):
    """In a table. The first row says less than the others, and gets the defaults."""
    others = [{"goal": 1, "system_message": "", "reset_kwargs": {"seed": 1}}, {"reset_kwargs": {"start": [{"a": 1}]}}]
    table = Dataset.from_list([{"env_config": each} for each in [{"base_url": "http://a"}, *others]])
    assert table[0]["env_config"]["goal"] is None and table[1]["env_config"]["reset_kwargs"]["start"] is None
    rollout, _ = run(Counting, "1", "2", row=table[0])
    assert rollout.prompt_messages[0]["content"] == "Count." and len(rollout.turns) == 2
    run(Counting, "1", row=table[1])
    run(Counting, "1", "2", row=table[2])
    assert [session.env_config for session in sessions.opened] == [
        {"goal": 2, "system_message": "Count.", "base_url": "http://a"}, others[0],
        {"goal": 2, "system_message": "Count.", **others[1]},
    ]  # fmt: skip


def test_a_null_that_a_row_of_json_says_arrives(sessions, tmp_path):
    """At every depth, and before the defaults. A key that the row does not have is none."""
    written = [{"reset_kwargs": {"seed": None, "a": {"b": None}}, "system_message": None}, {"reset_kwargs": None}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"env_config": each}) + "\n" for each in written))
    data = load_rows(str(tmp_path / "rows.jsonl"), "train", needs_prompt=False)
    env = conversations(Counting)
    for row in data:
        (rollout,) = env.start([[user("What?")]], rows=[row])
        run_async(env.converse(rollout, Scripted("1", "2"), {}))
        assert rollout.error is None
    assert [session.env_config for session in sessions.opened] == [
        {"goal": 2, **written[0]}, {"goal": 2, "system_message": "Count.", "reset_kwargs": None}
    ]  # fmt: skip


def test_without_openenvs_client_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "openenv", None)
    with pytest.raises(ImportError, match="openenv_scheduler needs OpenEnv's client .*pip install openenv-core"):
        OpenEnvWrapper({})


def test_a_step_is_never_sent_again(monkeypatch):
    """Behind a new connection there is a new game."""
    sent = []

    class Client:
        def __init__(self, base_url):
            assert base_url == "http://localhost:1"

        def sync(self):
            return self

        def reset(self, **kwargs):
            sent.append(("reset", kwargs))
            return types.SimpleNamespace(observation={}, reward=None, done=False)

        def step(self, action):
            sent.append(("step", action))
            raise ConnectionError("closed")

    module = types.ModuleType("openenv.core.generic_client")
    module.GenericEnvClient = Client
    for name in ("openenv", "openenv.core"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "openenv.core.generic_client", module)
    wrapper = OpenEnvWrapper({"base_url": "http://localhost:1", "reset_kwargs": {"seed": 1, "start": None}})
    assert wrapper.reset() == ({}, None)
    with pytest.raises(ConnectionError):
        wrapper.step({"answer": 1})
    assert sent == [("reset", {"seed": 1, "start": None}), ("step", {"answer": 1})]


def test_its_names():
    from swift.rollout.multi_turn import OpenEnvScheduler as found
    from swift.rollout.openenv_wrapper import OpenEnvWrapper as wrapper

    assert multi_turns["openenv_scheduler"] is found is OpenEnvScheduler and wrapper is OpenEnvWrapper


SERVER = """
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Say(Action):
    answer: int


class Asked(Observation):
    question: str


class Counting(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, start=0, **kwargs):
        self.count = start
        return Asked(question=f"Say {self.count + 1}.")

    def step(self, action, timeout_s=None, **kwargs):
        self.count += 1
        right = float(action.answer == self.count)
        return Asked(question=f"Say {self.count + 1}.", reward=right, done=self.count == 3)

    @property
    def state(self):
        return State(step_count=self.count)


app = create_fastapi_app(Counting, Say, Asked, max_concurrent_envs=64)
server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))


async def main():
    import asyncio

    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    await task


import asyncio

asyncio.run(main())
"""
CLIENT = """
import json
import sys

from test_ms_swift import Scripted, conversations, user

import mt_grpo_trainer as mt
from mt_grpo.adapters.ms_swift.gym import OpenEnvScheduler
from mt_grpo.base.event_loop import run_async

sys.path.append(sys.argv[2])
env, llm = conversations(OpenEnvScheduler, environment_timeout=60.0), Scripted('{"answer": 2}')
url = f"http://127.0.0.1:{sys.argv[1]}"
rows = [{"env_config": {"base_url": url, "reset_kwargs": {"start": start}}} for start in (0, 1, 2)]
rows.append({"env_config": {"base_url": "http://127.0.0.1:9"}})
rollouts = env.start([[user("What?")]] * 4, rows=rows)
run_async(mt.gather_all([env.converse(rollout, llm, {}) for rollout in rollouts]))
print(json.dumps([[[turn.reward for turn in r.turns], r.prompt_messages, str(r.error or "")] for r in rollouts]))
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_real_server(tmp_path):
    """OpenEnv 0.3 in an environment of its own: three sessions at a time, and an address where nobody answers."""
    python = tmp_path / "venv/bin/python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", "openenv-core>=0.3,<0.4"], check=True)
    site = next((tmp_path / "venv/lib").glob("python*/site-packages"))
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "client.py").write_text(CLIENT)
    server = subprocess.Popen([python, tmp_path / "server.py"], stdout=subprocess.PIPE, text=True)
    try:
        port = server.stdout.readline().strip()
        client = subprocess.run(
            # Its packages behind ours, which stay as they are.
            [sys.executable, tmp_path / "client.py", port, site], cwd=ROOT / "tests", capture_output=True, text=True,
            timeout=600, env={"PATH": "/usr/bin:/bin", "PYTHONPATH": IMPORTS, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        assert client.returncode == 0, client.stderr
    finally:
        server.kill()
        server.wait()
    zero, one, two, nobody = json.loads(client.stdout.splitlines()[-1])
    assert [zero[0], one[0], two[0]] == [[0.0, 1.0, 0.0], [1.0, 0.0], [0.0]]
    assert '"question": "Say 2."' in one[1][0]["content"]
    assert nobody[0] == [] and "Connect" in nobody[2]

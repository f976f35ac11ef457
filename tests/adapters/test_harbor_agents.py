"""Programs that work on task folders in their sandboxes: real commands, a real server. Only the policy is scripted."""

import asyncio
import functools
import importlib.util
import json
import logging
import os
import re
import secrets
import subprocess
import sys

import psutil
import pytest
from scripted import within
from test_agents import TOKENIZER, Scripted, ids, verify
from test_harbor import MODES, ROOT, needs_namespaces, no_namespaces, recipe, write_steps, write_task

import mt_grpo_trainer as mt
from mt_grpo.adapters.agents.conversation import agent_conversation
from mt_grpo.adapters.harbor import agents as harbor_agents
from mt_grpo.adapters.harbor.agents import AgentTask, TaskAgents, TaskProgram, load_task_agents
from mt_grpo.adapters.harbor.environment import HarborEnvironment
from mt_grpo.adapters.harbor.images import NamespaceImages
from mt_grpo.adapters.harbor.sandbox import NamespaceSandbox, SandboxLimits
from mt_grpo.adapters.harbor.tasks import Allowed
from mt_grpo.base.event_loop import run_async
from mt_grpo.conversation.environments import class_tools
from mt_grpo.conversation.tools.signature import tool_schema
from mt_grpo.rollout import StopReason

pytestmark = pytest.mark.faults  # a group of scripts/test.sh
# The way of this machine; the other one where there is time.
AGENT_MODES = [MODES[0], pytest.param(False, marks=[] if os.geteuid() else pytest.mark.slow)]

# In front of each program: `ask TEXT` prints what the policy answers.
ASK = r"""
ask() {
    printf '{"model": "policy", "messages": [{"role": "user", "content": "%s"}]}' "$1" |
        curl --silent --show-error --fail-with-body "$OPENAI_BASE_URL/chat/completions" --data @- \
            --header "Authorization: Bearer $OPENAI_API_KEY" "${@:2}" |
        python3 -c 'import json, sys; print(json.load(sys.stdin)["choices"][0]["message"]["content"])'
}
"""


def play(folder, program, *turns, as_user=None, llm=None, timeout=600.0, max_model_calls=8, shown=(), **settings):
    """The rollout of one program on the only task of a folder, which is its row."""
    agent = folder.parent / f"{folder.name}-agent"
    agent.mkdir(exist_ok=True)
    (agent / "agent.sh").write_text(ASK + program)
    found = TaskProgram(f"bash {agent}/agent.sh", [str(agent), *shown])
    mode = {} if as_user is None else {"as_user": as_user}
    images = NamespaceImages(functools.partial(NamespaceSandbox, **mode), shown=found.shown)
    own = {"images": images, "command": found.words, "known": {}, "told": set(), "verifier_seconds": 60.0}
    environment = type("harbor", (AgentTask,), own)
    rows = environment.read_folder(folder, "train")
    base = agent_conversation(mt.MultiTurnToolEnv, found, timeout, max_model_calls)
    settings = {"tokenizer": TOKENIZER, "tool_format": "hermes", "max_completion_length": 400, **settings}
    env = type("TaskAgents", (TaskAgents, base), {})([], None, environment=environment, **settings)
    (rollout,) = env.start([row["prompt"] for row in rows], rows=rows)
    llm = llm or Scripted(*turns)
    try:
        within(lambda: run_async(env.converse(rollout, llm, {"temperature": 1.0})), 120)
        if rollout.error is None:
            rollout.reward = run_async(env.environments.reward(rollout))
    finally:
        run_async(env.environments.close([rollout]))
        for server, _ in env._servers.values():
            run_async(server.stop())
    verify(rollout, llm)
    return rollout


if no_namespaces():
    pytestmark = [pytestmark, needs_namespaces]


class Watching(Scripted):
    """A policy that sees what runs on the machine while it writes."""

    def __init__(self, *turns):
        super().__init__(*turns)
        self.lines = []

    async def generate(self, *words, **more):
        for each in psutil.process_iter(["cmdline"]):
            self.lines.append(" ".join(each.info["cmdline"] or ()))
        return await super().generate(*words, **more)


@pytest.mark.parametrize("as_user", AGENT_MODES)
def test_a_program_works_in_the_sandbox_and_the_tests_judge(tmp_path, as_user):
    """Its files, its user, its row; records are exact. No argument of a process shows the key."""
    write_task(tmp_path / "tasks", dockerfile="FROM debian\nENV MODE=fast\nWORKDIR /app\nCOPY x .\n",
               toml='[environment]\nenv = {OPENAI_API_KEY = "the task\'s"}\n',
               **{"environment/x": "hello\n"})  # fmt: skip
    program = """
        python3 -c 'import json, sys
row = json.load(sys.stdin)
print(row["instruction"], row["task"], row["step"] == "", "task_folder" in row)' > row
        ask one > first
        { pwd; cat x; echo $MODE; id -u; env | grep -c PYTEST; grep -c : /proc/net/dev; ls -A /tests; } > facts
        ask two > out
        cat row first facts
    """
    llm = Watching("I see.", "right")
    rollout = play(tmp_path / "tasks", program, as_user=as_user, llm=llm)
    assert (rollout.error, rollout.stop_reason, rollout.reward) == (None, StopReason.AGENT_DONE, 1.0)
    assert [turn.token_ids for turn in rollout.turns] == [
        [*ids(text), TOKENIZER.eos_token_id] for text in ("I see.", "right")
    ]
    assert all(turn.trained for turn in rollout.turns)
    assert [turn.info.get("harbor", {}).get("rewards") for turn in rollout.turns] == [None, {"reward": 1.0}]
    lines = [line for line in llm.lines if not line.startswith("curl ")]  # which the program starts
    keys = [word for line in lines for word in re.findall(r"mt-[\w-]{32}", line)]
    assert any("agent.sh" in line for line in lines) and keys == []


@pytest.mark.parametrize("as_user", AGENT_MODES)
def test_a_program_finds_its_task_and_nothing_else(tmp_path, as_user):
    write_task(tmp_path / "tasks", tests="cat /app/facts\necho 1 > /logs/verifier/reward.txt\n")
    (tmp_path / "secret").write_text("x")
    program = f"""
        cat > row
        ask one > first
        exec > facts 2>&1
        python3 -c 'import json
row = json.load(open("row"))
print(row["instruction"], row["task"], row["step"] == "", "task_folder" in row)'
        pwd; id -u; env | grep -c PYTEST; tail -n +3 /proc/net/dev | grep -c :; ls -A /tests /logs/verifier
        cat {tmp_path}/secret; touch {tmp_path}/tasks-agent/x; cat first
        [ $(ls /proc | grep -c '^[0-9]') -lt 9 ] && echo alone
    """
    rollout = play(tmp_path / "tasks", program, "I see.", as_user=as_user)
    said = rollout.environment.said[0].output.splitlines()
    assert said[:2] == ["Write right into out. own/one True False", "/app"] and int(said[2]) != 0
    assert said[3:8] == ["0", "1", "/logs/verifier:", "", "/tests:"]
    assert "No such file" in said[8] and "Read-only file system" in said[9] and said[10:] == ["I see.", "alone"]


@pytest.mark.parametrize("as_user", AGENT_MODES)
def test_a_program_reaches_the_trainer_and_nobody_else(tmp_path, as_user):
    """Not what listens on the machine, nor the trainer once the program has ended."""
    tests = (
        "curl --silent $(cat /app/url)/models > /dev/null; echo $?  # on 127.0.0.1\necho 1 > /logs/verifier/reward.txt"
    )
    write_task(tmp_path / "tasks", tests=tests)
    with subprocess.Popen([sys.executable, "-u", "-m", "http.server", "--bind", "127.0.0.1", "0"], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=tmp_path) as other:  # fmt: skip
        try:
            port = re.search(r"port (\d+)", other.stdout.readline())[1]
            program = f"""
                curl --silent --head http://127.0.0.1:{port}; first=$?
                curl --silent --head --max-time 60 http://10.255.255.1; second=$?
                echo "$first $second" > codes
                echo $OPENAI_BASE_URL > url
                ask "$(cat codes)" > said
            """
            llm = Scripted("Yes.")
            rollout = play(tmp_path / "tasks", program, llm=llm, as_user=as_user)
        finally:
            other.kill()
    assert "7 7" in TOKENIZER.decode(llm.asked[0][0])
    assert rollout.reward == 1.0 and rollout.environment.said[0].output == "7\n"


ENDS = {
    "early": ("ask one; exit 3", "ended with exit code 3; it printed: 'Fine.'"),
    "by a signal": ("ask one; kill -KILL $$", "ended with exit code 137; it printed: 'Fine.'"),
    "with what is no JSON": ("ask one; echo {", None),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_program_that_ends_early_is_judged(tmp_path, caplog, name):
    """The policy's commands may end it, and would be rid of their rollout."""
    program, how = ENDS[name]
    write_task(tmp_path / "tasks")
    with caplog.at_level(logging.WARNING):
        rollout = play(tmp_path / "tasks", f"echo right > out\n{program}", "Fine.")
    assert (rollout.error, rollout.reward, rollout.failed) == (None, 1.0, False)
    assert rollout.turns[0].info["harbor"].get("agent") == how
    assert (f"The task own/one: agent_command {how}. The tests judge it." in caplog.text) == (how is not None)


def test_a_program_that_never_asks_is_the_operators_fault(tmp_path):
    write_task(tmp_path / "tasks")
    rollout = play(tmp_path / "tasks", "echo oh; no-such-program", "never")
    assert rollout.stop_reason == StopReason.AGENT_ERROR and rollout.failed
    assert "never got a completion of the policy. It ended with exit code 127; it printed: 'oh\\n" in str(
        rollout.error
    )
    assert "no-such-program: command not found" in str(rollout.error)


def answered(monkeypatch):
    """The program's time is over as soon as it has an answer, however slow the machine is."""

    async def own_time(running, session, seconds, until_over=True):
        seen.append(seconds)
        while not session.got_an_answer and not running.done():
            await asyncio.sleep(0.01)

    seen = []
    monkeypatch.setattr(harbor_agents, "own_time", own_time)
    return seen


@pytest.mark.parametrize("as_user", AGENT_MODES)
@pytest.mark.parametrize("hangs", [
    "trap '' TERM; while true; do :; done", *(pytest.param(each, marks=pytest.mark.slow) for each in (
        "sleep 100000", "cat /dev/zero")),
])  # fmt: skip
def test_a_program_that_hangs_is_ended_and_judged(tmp_path, monkeypatch, as_user, hangs):
    seen = answered(monkeypatch)
    write_task(tmp_path / "tasks", toml="[agent]\ntimeout_sec = 90\n")
    rollout = play(tmp_path / "tasks", f"echo right > out\nask one\n{hangs}", "Fine.", as_user=as_user)
    assert (rollout.error, rollout.reward, rollout.stop_reason) == (None, 1.0, StopReason.ENVIRONMENT_STOP)
    assert rollout.turns[0].info["harbor"]["agent"].startswith("was ended at its time limit") and seen == [90]


@pytest.mark.parametrize("as_user", AGENT_MODES)
def test_nothing_of_a_program_runs_beside_its_tests(tmp_path, as_user):
    """No daemon, whatever it does to be one."""
    own = secrets.token_hex(8)
    stays = f": {own}; echo >> /tmp/started; while true; do echo right > /app/out; sleep 0.01; done"
    program = f"""
        ask one
        setsid bash -c '{stays}' > /dev/null 2>&1 < /dev/null &
        (nohup bash -c '{stays}' &) &
        until [ -e /tmp/started ] && [ $(cat /tmp/started | wc -l) = 2 ]; do sleep 0.01; done
    """
    tests = "rm /app/out; sleep 0.1; ls /app > /logs/verifier/left; [ -e /app/out ]\n"
    write_task(tmp_path / "tasks", tests=tests + "echo $(($? == 0)) > /logs/verifier/reward.txt\n")
    rollout = play(tmp_path / "tasks", program, "Fine.", as_user=as_user)
    assert (rollout.error, rollout.reward) == (None, 0.0)
    assert not [each.pid for each in psutil.process_iter(["cmdline"]) if own in " ".join(each.info["cmdline"] or ())]


FORGERIES = [
    "echo 1 > /logs/verifier/reward.txt; mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh",
    "umount /tests; mount -t tmpfs x /tests; mv /logs /l; unshare --user --map-root-user --mount umount /logs/home",
    "echo 'cat() { echo right; }' | tee /root/.bashrc > /root/.profile; ln -s /usr/bin/true /app/cat",
]


@pytest.mark.parametrize("as_user", AGENT_MODES)
@pytest.mark.parametrize("attempt", FORGERIES)
def test_a_program_cannot_forge_its_reward(tmp_path, as_user, attempt):
    write_task(tmp_path / "tasks")
    rollout = play(tmp_path / "tasks", f"ask one\necho wrong > out\n{attempt}", "Fine.", as_user=as_user)
    assert (rollout.error, rollout.reward) == (None, 0.0)


def test_no_request_gives_a_reward(tmp_path):
    """The policy's commands know the key, and could pay themselves."""
    write_task(tmp_path / "tasks", tests="cat /app/said\necho 0 > /logs/verifier/reward.txt\n")
    program = "ask one > first\nask two --header 'X-Turn-Reward: 1000' > said 2>&1\nask three >> said"
    rollout = play(tmp_path / "tasks", program, "One.", "Three.")
    assert [turn.reward for turn in rollout.turns] == [None, None] and rollout.reward == 0.0
    assert "the tests of the task give the rewards. Remove it." in rollout.turns[-1].info["refused"]


def test_what_a_program_returns_is_no_reward(tmp_path):
    write_task(tmp_path / "tasks")
    assert play(tmp_path / "tasks", "ask one\necho '{\"reward\": 1.0}'", "Fine.").reward == 0.0


def test_a_budget_that_is_spent_is_judged(tmp_path):
    write_task(tmp_path / "tasks")
    program = "set -e -o pipefail\necho right > out\nask one\nask two"
    rollout = play(tmp_path / "tasks", program, "Fine.", max_model_calls=1)
    assert (rollout.error, rollout.reward, rollout.stop_reason) == (None, 1.0, StopReason.MAX_TURNS)
    assert len(rollout.turns) == 1 and "agent" not in rollout.turns[0].info["harbor"]  # it was told so


STEP = """
    step=$(python3 -c 'import json, sys; print(json.load(sys.stdin)["step"])')
    ask "$step"
    ask more
    if [ "$step" = first ]; then touch a; else touch b; fi
"""


def test_a_program_works_on_each_step_and_each_steps_tests_pay_its_last_turn(tmp_path):
    write_steps(tmp_path / "tasks")
    rollout = play(tmp_path / "tasks", STEP, "1", "2", "3", "4")
    assert [turn.reward for turn in rollout.turns] == [None, 1.0, None, 1.0] and rollout.reward == 1.0
    assert [turn.info.get("harbor", {}).get("step") for turn in rollout.turns] == [None, "first", None, "second"]
    assert rollout.stop_reason == StopReason.AGENT_DONE


def test_a_step_that_a_program_misses_ends_the_task(tmp_path):
    toml = '[[steps]]\nname = "first"\nmin_reward = 1.0\n[[steps]]\nname = "second"\n'
    write_steps(tmp_path / "tasks", toml=toml)
    rollout = play(tmp_path / "tasks", "ask one", "1")
    assert [turn.reward for turn in rollout.turns] == [0.0] and rollout.reward == 0.0


def test_a_step_in_which_nothing_is_asked_pays_no_turn_of_another_one(tmp_path):
    write_steps(tmp_path / "tasks")
    program = STEP.replace("ask more", "").replace('ask "$step"', '[ "$step" = second ] || ask one')
    rollout = play(tmp_path / "tasks", program, "1")
    assert [turn.reward for turn in rollout.turns] == [1.0] and rollout.reward == 1.0


def test_a_sandbox_that_is_lost_under_a_program_is_no_fault_of_the_policys(tmp_path, monkeypatch):
    write_task(tmp_path / "tasks")
    holders, work = [], AgentTask._work

    def noted(self, variables):
        holders.append(self._desk.sandbox._holder)
        return work(self, variables)

    class Killing(Scripted):
        async def generate(self, *words, **more):
            holders[0].kill()
            holders[0].wait()
            return await super().generate(*words, **more)

    monkeypatch.setattr(AgentTask, "_work", noted)
    rollout = play(tmp_path / "tasks", "ask one", llm=Killing("Fine."))
    assert rollout.stop_reason == StopReason.ENVIRONMENT_ERROR and rollout.failed and "has ended" in str(rollout.error)


@pytest.mark.slow
@pytest.mark.parametrize("as_user", MODES)
def test_openais_client_works_in_a_sandbox(tmp_path, as_user):
    """By an environment of Python's, and its interpreter, that stand in folders of the operator's."""
    write_task(tmp_path / "tasks")
    program = f"""
        {sys.executable} - <<'END' > out
import openai
messages = [dict(role="user", content="What?")]
print(openai.OpenAI().chat.completions.create(model="policy", messages=messages).choices[0].message.content)
END
    """
    shown = sorted({sys.prefix, sys.base_prefix})
    rollout = play(tmp_path / "tasks", program, "right", as_user=as_user, shown=shown)
    assert (rollout.error, rollout.reward) == (None, 1.0)


@pytest.mark.parametrize("as_user", AGENT_MODES)
def test_an_engine_that_reserves_more_memory_than_it_uses_works(tmp_path, as_user):
    """As Node.js does, which reserves gigabytes. What is written to is limited."""
    write_task(tmp_path / "tasks", toml="[environment]\nmemory_mb = 1024\n", tests="cat /app/said /app/large\n")
    program = """
        ask one
        python3 -c 'import mmap
mmap.mmap(-1, 4 * 2**30, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0)
print(6 * 7)' > said 2>&1
        python3 -c 'bytes(2 * 2**30)' > large 2>&1
    """
    rollout = play(tmp_path / "tasks", program, "Fine.", as_user=as_user)
    assert rollout.environment.said[0].output.startswith("42\n")
    assert rollout.environment.said[0].output.endswith("MemoryError\n")


def test_what_is_shown_can_be_beside_the_tasks_own_files(tmp_path):
    """In a sealed root, beneath folders that the task has, too."""
    shown = tmp_path / "shown"
    shown.mkdir()
    (shown / "word").write_text("right")
    sandbox = NamespaceSandbox(SandboxLimits(1024, 64), shown=[str(shown)])
    try:
        sandbox.seal()
        outcome = sandbox.shell(f"cat {shown}/word; touch {shown}/x {tmp_path}/y; ls {tmp_path}", "/", "/", {}, 60.0)
    finally:
        sandbox.close()
    assert outcome.text(999).startswith("right") and outcome.text(999).endswith("shown\ny\n")
    assert "Read-only file system" in outcome.text(999) and os.listdir(shown) == ["word"]


# -- what a recipe says -----------------------------------------------------------------------------------------------


def agent_recipe(folder, **keys):
    """The words of a command line; keys of the tool `bash` are not there."""
    return recipe(folder, **{"agent_command": "bash -c true", "harbor_docker": None, **keys})


@pytest.mark.parametrize("keys, words", [
    ({"agent_command": "no-such-program x"}, "agent_command: a sandbox has no program 'no-such-program'. It has /usr"),
    ({"agent_command": "'x"}, "agent_command: \"'x\" is no command"),
    ({"agent_command": "python3 tools/agents/bash_on_a_task.py"},
     f"a sandbox has no 'tools/agents/bash_on_a_task.py'. Name a folder that has it in harbor_agent_folders, such as "
     f"{ROOT}/tools/agents"),
    ({"harbor_agent_folders": ["/nowhere"]}, "harbor_agent_folders: '/nowhere' is no folder"),
    ({"harbor_agent_folders": ["/"]}, "harbor_agent_folders: '/' cannot be shown"),
    ({"harbor_agent_folders": ["/usr/lib"]}, "harbor_agent_folders: '/usr/lib' cannot be shown"),
    ({"harbor_agent_folders": ["/tmp"]}, "harbor_agent_folders: '/tmp' cannot be shown"),
    ({"harbor_agent_folders": ["/opt"], "agent_command": None},
     "harbor_agent_folders has no effect without agent_command"),
    ({"harbor_agent_folders": ["/opt"], "agent_command": None, "environment": "gym"},
     "harbor_agent_folders has no effect without the line environment: harbor and agent_command"),
    ({"agent": "a.py:b"}, "agent has no effect with environment: harbor with agent_command: a function runs"),
    ({"agent_key": "pipe"}, "agent_key has no effect with environment: harbor with agent_command"),
    ({"harbor_command_timeout": 5}, "harbor_command_timeout has no effect with environment: harbor with agent"),
    ({"max_env_steps": 5}, "max_env_steps has no effect with environment: harbor with agent_command"),
    ({"system_prompt": "Hi."}, "system_prompt has no effect with environment: harbor with agent_command"),
    ({"harbor_docker": "always"}, "harbor_docker: always with agent_command"),
    ({"harbor_network": True}, "harbor_network: true needs Docker"),
    ({"tool_format": "xml"}, "tool_format='xml' does not fit environment: harbor with agent_command"),
    ({"agent_command": None, "agent_other_models": "frozen"}, "agent_other_models has no effect without the line"),
    ({"dataset_name": "arithmetic"}, "dataset_name is 'arithmetic', expected a folder of task folders"),
])  # fmt: skip
def test_a_recipe_with_a_program_that_cannot_work_says_so(tmp_path, monkeypatch, keys, words):
    monkeypatch.chdir(ROOT)
    write_task(tmp_path / "tasks")
    with pytest.raises((SystemExit, ValueError)) as error:
        mt.main(agent_recipe(tmp_path / "tasks", **keys))
    assert words in str(error.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="not as root, the program's user is the trainer's")
def test_a_folder_that_the_programs_user_cannot_read_is_refused(tmp_path, monkeypatch):
    """Such as one of `mktemp -d`. Each rollout would fail, by words of the program's own."""
    monkeypatch.chdir(ROOT)
    write_task(tmp_path / "tasks")
    shown = [tmp_path / name for name in ("open", "closed")]
    for folder, mode in zip(shown, (0o755, 0o700)):
        folder.mkdir()
        (folder / "work.sh").write_text("true\n")
        folder.chmod(mode)
    words = agent_recipe(
        tmp_path / "tasks", agent_command=f"sh {shown[1]}/work.sh", harbor_agent_folders=[*map(str, shown)]
    )
    with pytest.raises((SystemExit, ValueError)) as error:
        mt.main(words)
    assert f"harbor_agent_folders: '{shown[1]}' cannot be read in a sandbox" in str(error.value)
    assert f"chmod -R a+rX {shown[1]})" in str(error.value)


def test_what_a_recipe_says_of_a_program_reaches_the_classes(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    write_task(tmp_path / "tasks")
    words = agent_recipe(
        tmp_path / "tasks", agent_command="python3 tools/agents/bash_on_a_task.py -v", agent_timeout=7,
        harbor_agent_folders=["tools/agents"], max_model_calls=5, harbor_memory_mb=128, environment_timeout=50,
    )  # fmt: skip
    script_args, args, _ = mt.parse_arguments(words)
    env, cls = load_task_agents(script_args, args, mt.MultiTurnToolEnv)
    assert issubclass(env, TaskAgents) and (env.agent_timeout, env.max_model_calls) == (7, 5)
    assert cls.command == ("python3", f"{ROOT}/tools/agents/bash_on_a_task.py", "-v")
    assert (cls.verifier_seconds, cls.allowed) == (40, Allowed(128, 1024, False, False))
    assert cls.images._shown == (f"{ROOT}/tools/agents",) and cls.__name__ == "harbor"


def test_the_sample_offers_the_tool_that_its_model_knows():
    spec = importlib.util.spec_from_file_location("bash_on_a_task", ROOT / "tools/agents/bash_on_a_task.py")
    sample = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sample)
    known = tool_schema("bash", class_tools(HarborEnvironment)["bash"])["function"]
    assert sample.BASH["function"] == {name: known[name] for name in ("name", "description", "parameters")}
    folder = {"at": str(ROOT)}  # and each call begins where the last one ended
    for command, said in (("cd /tmp && false", "[exit code 1]"), ("pwd", "/tmp"), ("cd /; exit 0", "[no output]")):
        call = {"function": {"arguments": json.dumps({"command": command})}}
        assert sample.run(call, folder).strip() == said
    assert folder == {"at": "/"}


@pytest.mark.slow
def test_the_recipe_of_the_sample_trains_a_step(tmp_path, monkeypatch):
    """Records of its rollouts, and rewards of its tests."""
    monkeypatch.chdir(ROOT)
    words = ["--max_steps", "1", "--num_generations", "2", "--per_device_train_batch_size", "4"]
    mt.main(["--config", "hf_recipes/tiny/harbor-agent.yaml", *words, "--output_dir", str(tmp_path)])
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert 0 <= history[0]["rewards/harbor/mean"] <= 1 and history[0]["stop/environment_error"] == 0
    assert history[0]["stop/agent_error"] == 0 and history[0]["turns/mean"] >= 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_tiny_model_learns_the_samples_by_a_program(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    mt.main(["--config", "hf_recipes/tiny/harbor-agent.yaml", "--output_dir", str(tmp_path), "--disable_tqdm", "true"])
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    means = [row["rewards/harbor/mean"] for row in history if "rewards/harbor/mean" in row]
    print(sum(means[:5]) / 5, sum(means[-5:]) / 5)
    assert sum(means[-5:]) / 5 > sum(means[:5]) / 5 + 0.15

"""A stand-in for the package `harbor`, as far as tools/agents/harbor_trial.py uses it.

`plan.json` of a task folder has `trial` (its `rewards`, an `error`, `hang` or `crash`), and `steps` of the same form.
The agent asks the policy once per step, or once.
"""

import asyncio
import json
import os
import sys
import urllib.request
from types import SimpleNamespace

__path__ = []
for name in ("models", "models.trial", "models.trial.config", "trial", "trial.hooks", "trial.trial"):
    sys.modules[f"harbor.{name}"] = sys.modules[__name__]
AgentConfig = EnvironmentConfig = TaskConfig = TrialConfig = SimpleNamespace
TrialEvent = SimpleNamespace(AGENT_START="agent-start")


def result_of(plan):
    rewards, error = plan.get("rewards"), plan.get("error")
    info = error and SimpleNamespace(exception_type=error, exception_message="it failed")
    verifier_result = None if rewards is None else SimpleNamespace(rewards=rewards)
    return SimpleNamespace(verifier_result=verifier_result, exception_info=info, step_results=None)


class Trial:
    @classmethod
    async def create(cls, config):
        self = cls()
        self.agent, self.folder = config.agent, config.task.path
        self.plan = json.loads((self.folder / "plan.json").read_text())
        self.result = result_of({})
        return self

    def add_hook(self, event, hook):
        assert event == "agent-start"
        self.hook = hook

    async def run(self):
        print("what Harbor prints is no message")
        plan = self.plan["trial"]
        if "crash" in plan:
            os._exit(3)
        if "hang" in plan:
            (self.folder / "begun").touch()
            try:
                await asyncio.sleep(3600)
            finally:
                (self.folder / "ended").touch()
        steps = self.plan.get("steps", [])
        self.result.step_results = [] if steps else None
        for step in steps or [None]:
            if step is not None:
                self.result.step_results.append(result_of({}))
            await self.hook("event")
            await asyncio.to_thread(self.ask)
            if step is not None:
                self.result.step_results[-1] = result_of(step)
        results = self.result.step_results
        self.result = result_of(plan)
        self.result.step_results = results
        return self.result

    def ask(self):
        assert self.agent.model_name == "openai/policy"
        body = {"model": "policy", "messages": [{"role": "user", "content": "Work."}]}
        headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
        url = f"{os.environ['OPENAI_BASE_URL'].rstrip('/')}/chat/completions"
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
            assert "content" in json.loads(answer.read())["choices"][0]["message"]

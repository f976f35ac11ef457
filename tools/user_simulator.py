"""A user played by a second model: `environment: tools/user_simulator.py:SimulatedUser`, with any `tools_script`.

`USER_URL` is a server with OpenAI's API, such as http://127.0.0.1:8001/v1; `USER_MODEL` is its model's name.
The dataset's column `goal` says what the user wants. The reward is 1 if the user is satisfied in the end.
"""

import os

import aiohttp

ROLE = "Play the user of an assistant. You want: {goal}\nWrite the user's next message, or DONE when you have it."


class SimulatedUser:
    def reset(self, goal: str, prompt: list, **row) -> None:
        self.said = [{"role": "system", "content": ROLE.format(goal=goal)}]
        self.said.append({"role": "assistant", "content": prompt[-1]["content"]})  # this model is the user
        self.content = False

    async def respond(self, rollout, turn):
        if turn.calls:  # the results come first
            return None
        self.said.append({"role": "user", "content": turn.answer or turn.text})
        message = await self._ask({"model": os.environ["USER_MODEL"], "messages": self.said, "max_tokens": 200})
        self.said.append({"role": "assistant", "content": message})
        self.content = message.strip(" \n.!") == "DONE"
        return {"stop": True} if self.content else {"messages": [{"role": "user", "content": message}]}

    async def _ask(self, payload: dict) -> str:
        async with aiohttp.ClientSession(raise_for_status=True) as session:
            async with session.post(f"{os.environ['USER_URL']}/chat/completions", json=payload) as response:
                return (await response.json())["choices"][0]["message"]["content"]

    def get_reward(self) -> float:
        return float(self.content)

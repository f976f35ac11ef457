"""As many turns as there may be: `environment: tools/running_total.py:RunningTotal`, with tools/step_calculator.py.

Each turn names one operation on the last result. A call that runs is paid 0.2, the right one 1. The row is a seed.
"""

import random


class RunningTotal:
    def reset(self, question: str, **row) -> list[dict]:
        self.random, self.value = random.Random(question), 50
        return [{"role": "user", "content": f"Start with {self.value}, then {self._next()}."}]

    def respond(self, rollout, turn):
        results = [result.text for result in turn.results if result.error is None]
        reward = 0.2 * bool(results) + 0.8 * (results == [str(self.value + self.step)])
        self.value = int(results[-1]) if results else self.value
        return {"messages": [{"role": "user", "content": f"then {self._next()}."}], "reward": reward}

    def _next(self) -> str:
        self.step = self.random.choice((-1, 1)) * self.random.randint(2, 30)
        return f"{'+' if self.step > 0 else '-'} {abs(self.step)}"

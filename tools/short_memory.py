"""An environment that forgets: `environment: tools/short_memory.py:ShortMemory`, with any `tools_script`.

After each call the model reads only the last results; older results and its own thinking are removed. Every turn is
trained in the context in which it was sampled (metric `records/mean`).
"""

import re

THINKING = re.compile(r"\A.*?</(think|reasoning)>\s*", re.DOTALL)


class ShortMemory:
    def reset(self, **row) -> None:
        pass

    def respond(self, rollout, turn):
        if not turn.results:
            return None
        first, last = len(rollout.prompt_messages), -len(turn.results)
        old = [
            {**m, "content": THINKING.sub("", m["content"]) if m["role"] == "assistant" else "(forgotten)"}
            for m in rollout.history[first:last]
        ]
        history = rollout.history[:first] + old + rollout.history[last:]
        return None if history == rollout.history else {"history": history}

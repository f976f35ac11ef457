"""The calculator's task as a plug-in for ms-swift: a scheduler and a reward, with its names and import paths.

    external_plugins: [tools/ms_swift/calculator.py]
    multi_turn_scheduler: calculator
    reward_funcs: [calculator_answer]

`swift` is found here where ms-swift is not installed.
"""

import json

from swift.rewards import ORM, orms
from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns

from tools.agents.calculator import CALCULATOR, calculator


class Calculator(MultiTurnScheduler):
    """Runs the calls of a turn, and has the model read their results, until it answers."""

    async def on_trajectory_start(self, requests):
        """The tools, and how to use them."""
        for request in requests:
            request.tools = [CALCULATOR]
            system = {"role": "system", "content": "Use the calculator, then answer."}
            request.messages = [system, {"role": "user", "content": request.data_dict["question"]}]

    def check_finished(self, infer_request, response_choice, current_turn):
        """After a turn without a call, too."""
        no_call = not response_choice.message.tool_calls
        return no_call or super().check_finished(infer_request, response_choice, current_turn)

    def step(self, infer_request, response_choice, current_turn):
        """The results of the turn's calls."""
        for call in response_choice.message.tool_calls:
            infer_request.messages.append({"role": "tool", "content": run_call(call)})
        return {"infer_request": infer_request}


def run_call(call):
    """What the model reads: a number, or what was wrong."""
    function = call.function
    try:
        if function.name != "calculator":
            raise ValueError(f"there is no tool {function.name!r}")
        return calculator(**json.loads(function.arguments))
    except (TypeError, ValueError, SyntaxError, ArithmeticError, RecursionError) as error:
        return f"Error: {error}"


class CalculatorAnswer(ORM):
    """1.0 where the last message is the row's answer."""

    def __call__(self, completions, answer, **kwargs):
        """One reward per completion."""
        return [float(text.strip() == right) for text, right in zip(completions, answer)]


multi_turns["calculator"] = Calculator
orms["calculator_answer"] = CalculatorAnswer

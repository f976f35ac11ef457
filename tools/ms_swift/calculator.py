"""The calculator task as a plug-in for ms-swift: a scheduler and a reward, with ms-swift's names and import paths.

    external_plugins: [tools/ms_swift/calculator.py]
    multi_turn_scheduler: calculator
    reward_funcs: [calculator_answer]

The imports of `swift` also work if ms-swift is not installed.
"""

from swift.rewards import ORM, orms
from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns

from tools.agents.calculator import CALCULATOR, run_call


class Calculator(MultiTurnScheduler):
    """Runs the calls of each turn, and lets the model read their results, until it answers."""

    async def on_trajectory_start(self, requests):
        """Set the tools and the system message."""
        for request in requests:
            request.tools = [CALCULATOR]
            system = {"role": "system", "content": "Use the calculator, then answer."}
            request.messages = [system, {"role": "user", "content": request.data_dict["question"]}]

    def check_finished(self, infer_request, response_choice, current_turn):
        """Whether the conversation ends: also after a turn without a call."""
        no_call = not response_choice.message.tool_calls
        return no_call or super().check_finished(infer_request, response_choice, current_turn)

    def step(self, infer_request, response_choice, current_turn):
        """Append the results of the turn's calls."""
        for call in response_choice.message.tool_calls:
            infer_request.messages.append({"role": "tool", "content": run_call(call)})
        return {"infer_request": infer_request}


class CalculatorAnswer(ORM):
    """Rewards 1.0 if the last message is the row's answer, else 0.0."""

    def __call__(self, completions, answer, **kwargs):
        """Return one reward per completion."""
        return [float(text.strip() == right) for text, right in zip(completions, answer)]


multi_turns["calculator"] = Calculator
orms["calculator_answer"] = CalculatorAnswer

"""verl's GSM8K and search tools and its GSM8K interaction, under their names, if its own files are not there."""

from __future__ import annotations

import asyncio
import re
import uuid
from typing import Any

from mt_grpo.base.errors import tell_once
from mt_grpo.conversation.tools.running import run_tool
from mt_grpo.integrations.verl.base import BaseInteraction, BaseTool
from mt_grpo.integrations.verl.schemas import OpenAIFunctionToolSchema, ToolResponse
from mt_grpo.integrations.verl.search import ATTEMPTS, as_json, perform_single_search_batch


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """The number of a solution, in its last 300 characters: after its last `####` (strict), or the last (flexible).

    As in verl, `flexible` keeps commas, and a full stop after the number.

    >>> extract_solution("So 7. #### 1,234"), extract_solution("It is 7."), extract_solution("It is 8", "flexible")
    ('1234', None, '8')
    >>> [extract_solution(text, "flexible") for text in ("It is 8.", "8 .", ".")]
    ['8.', '8', '.']
    """
    text = solution_str[-300:]
    if method == "strict":
        matches = re.findall(r"#### (-?[0-9.,]+)", text)
        return matches[-1].replace(",", "") if matches else None
    numbers = re.findall(r"-?[0-9.,]+", text)
    return next((number for number in reversed(numbers) if number != "."), numbers[0] if numbers else None)


def compute_score(
    solution_str: str, ground_truth: str, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` for the right number, `format_score` for another one, 0 for none."""
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0
    return score if answer == ground_truth else format_score


def score_of(state: dict[str, Any], method: str) -> float:
    """The score of a conversation's last answer. A number as ground truth is as good as its text."""
    truth = state["ground_truth"]
    if truth is None:
        tell_once(
            "There is no ground_truth, so every answer counts as wrong. Set one in the row's create_kwargs "
            "(Gsm8kTool) or interaction_kwargs (Gsm8kInteraction)."
        )
    truth = f"{truth:.15g}" if isinstance(truth, (int, float)) else truth
    return compute_score(state["response"] or "", truth, method)


class Gsm8kStates:
    """The states of conversations. As in verl, subclasses find that of a conversation in `_instance_dict`."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._instance_dict: dict[str, dict[str, Any]] = {}

    def begin(self, instance_id: str | None, ground_truth: str | None) -> str:
        """Begin a conversation. Returns its id."""
        instance_id = instance_id or str(uuid.uuid4())
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth, "reward": 0.0}
        return instance_id


class Gsm8kTool(Gsm8kStates, BaseTool):
    """Tells whether an answer is right. Its row's `create_kwargs` have the `ground_truth`.

    The reward of a turn is -0.05 for an answer that is no better than the one before it. The outcome reward is the
    last answer's.
    """

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        if ground_truth is None:
            ground_truth = kwargs.get("create_kwargs", {}).get("ground_truth")
        return self.begin(instance_id, ground_truth), ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[Any, float, dict]:
        answer, state = str(parameters.get("answer", "")), self._instance_dict[instance_id]
        state["response"] = answer if answer.startswith("#### ") else f"#### {answer}"
        reward = await self.calc_reward(instance_id)
        penalty, state["reward"] = 0.0 if reward > state["reward"] else -0.05, reward
        return ToolResponse(text=f"Current parsed {answer=} {reward=}"), penalty, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return score_of(self._instance_dict[instance_id], "flexible")

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self._instance_dict[instance_id]


class SearchTool(BaseTool):
    """Asks a server of Search-R1's protocol, such as scripts/serve_search.py, for the argument `query_list`."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None):
        super().__init__(config, tool_schema)
        self.url, self.timeout = config["retrieval_service_url"], config.get("timeout", 30)
        self.topk = config.get("topk", 3)
        self.slots = asyncio.Semaphore(config.get("rate_limit", 120))  # requests at the same time, as in verl

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[Any, float, dict]:
        queries = parameters.get("query_list")
        if not queries or not isinstance(queries, list):
            return ToolResponse(text=as_json("Error: query_list is missing, empty, or no list.")), 0.0, {}
        request = {"retrieval_service_url": self.url, "query_list": queries, "topk": self.topk}
        request["timeout"] = self.timeout
        # As long as its attempts may take; the trainer's own tool_timeout comes first if it is shorter.
        longest = ATTEMPTS * self.timeout + 60
        async with self.slots:
            text, metrics = await run_tool(perform_single_search_batch, request, longest, tuple)
        return ToolResponse(text=text), 0.0, metrics


class Gsm8kInteraction(Gsm8kStates, BaseInteraction):
    """Asks again until the answer after `####` is right. Its row's `interaction_kwargs` have the `ground_truth`."""

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> str:
        return self.begin(instance_id, ground_truth)

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        texts = [message.get("content") for message in messages if message.get("role") == "assistant"]
        self._instance_dict[instance_id]["response"] = texts[-1] if texts else ""
        score = await self.calculate_score(instance_id)
        if score == 1.0:
            return True, "Your response is correct!", score, {}
        return False, "Your response is incorrect! You need to reflect on your answer and try again.", score, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        return score_of(self._instance_dict[instance_id], "strict")

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        del self._instance_dict[instance_id]

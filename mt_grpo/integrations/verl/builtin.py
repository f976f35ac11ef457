"""verl's GSM8K and search tools and its GSM8K interaction, under their names, where its own files are not there."""

from __future__ import annotations

import asyncio
import functools
import importlib
import logging
import re
import uuid
from typing import Any

from mt_grpo.conversation.tools.threads import run_tool
from mt_grpo.integrations.verl.base import BaseInteraction, BaseTool
from mt_grpo.integrations.verl.schemas import OpenAIFunctionToolSchema, ToolResponse
from mt_grpo.integrations.verl.search import as_json, perform_single_search_batch

logger = logging.getLogger(__name__)
NO_CALL = "no tool call"
READ_OF = 300  # the last characters of a solution


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """The number that a solution gives: behind its last `####` (strict), or the last there is (flexible).

    As in verl, `flexible` keeps commas, and a full stop behind the number.

    >>> extract_solution("So 7. #### 1,234"), extract_solution("It is 7."), extract_solution("It is 8", "flexible")
    ('1234', None, '8')
    >>> [extract_solution(text, "flexible") for text in ("It is 8.", "8 .", ".")]
    ['8.', '8', '.']
    """
    text = solution_str[-READ_OF:]
    if method == "strict":
        found = re.findall(r"#### (-?[0-9.,]+)", text)
        return found[-1].replace(",", "") if found else None
    if method != "flexible":
        raise ValueError(f"method={method!r}, expected strict or flexible.")
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


def score_of(solution: str, truth: Any, method: str) -> float:
    """Call `verl.utils.reward_score.gsm8k.compute_score`, which a plug-in may have replaced."""
    if truth is None:
        warn_of_no_truth()
    if isinstance(truth, (int, float)):  # a row's own; verl's preprocessing writes text
        truth = f"{truth:.15g}"
    gsm8k = importlib.import_module("verl.utils.reward_score.gsm8k")
    return gsm8k.compute_score(solution, truth, method=method, format_score=0.0, score=1.0)


@functools.cache
def warn_of_no_truth() -> None:
    """Say once why all scores are 0."""
    logger.warning(
        "There is no ground_truth, so every answer counts as wrong. Set one in the row's create_kwargs "
        "(Gsm8kTool) or interaction_kwargs (Gsm8kInteraction)."
    )


class Gsm8kTool(BaseTool):
    """Tells whether an answer is right. Its row's `create_kwargs` have the `ground_truth`.

    The reward of a turn is -0.05 for an answer that is no better than the one before it. The outcome reward is the
    last answer's. As in verl, subclasses find the state of a conversation in `_instance_dict`.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None):
        super().__init__(config, tool_schema)
        self._instance_dict: dict[str, dict[str, Any]] = {}

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Begin a conversation."""
        instance_id = str(uuid.uuid4()) if instance_id is None else instance_id
        if ground_truth is None:
            ground_truth = kwargs.get("create_kwargs", {}).get("ground_truth")
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth, "reward": 0.0}
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[Any, float, dict]:
        """Check the argument `answer`."""
        state, answer = self._instance_dict[instance_id], parameters.get("answer", "")
        answer = answer if isinstance(answer, str) else str(answer)
        state["response"] = answer if answer.startswith("#### ") else f"#### {answer}"
        reward = await self.calc_reward(instance_id)
        state = self._instance_dict[instance_id]  # a subclass may have put another one there
        given, state["reward"] = 0.0 if reward > state["reward"] else -0.05, reward
        return ToolResponse(text=f"Current parsed {answer=} {reward=}"), given, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """1 where the last answer is right."""
        state = self._instance_dict[instance_id]
        return score_of(state["response"], state["ground_truth"], "flexible")

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Forget a conversation. Raises `KeyError` for one that is not there."""
        del self._instance_dict[instance_id]


class SearchTool(BaseTool):
    """Asks a server of Search-R1's protocol, such as scripts/serve_search.py, for the argument `query_list`."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None):
        super().__init__(config, tool_schema)
        self.url = config.get("retrieval_service_url")
        if not self.url:
            raise ValueError(
                "config has no retrieval_service_url. Set it to an address such as http://127.0.0.1:8000/retrieve."
            )
        self.slots = asyncio.Semaphore(config.get("rate_limit", 120))  # requests at the same time, as in verl

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[Any, float, dict]:
        """Search, in a thread."""
        queries, timeout = parameters.get("query_list"), self.config.get("timeout", 30)
        if not queries or not isinstance(queries, list):
            return ToolResponse(text=as_json("Error: query_list is missing, empty, or no list.")), 0.0, {}
        asked = {"retrieval_service_url": self.url, "query_list": queries, "timeout": timeout}
        asked["topk"] = self.config.get("topk", 3)
        # As long as its attempts may take; the trainer's own tool_timeout comes first where it is shorter.
        async with self.slots:
            text, metrics = await run_tool(perform_single_search_batch, asked, 10 * timeout + 60, tuple)
        return ToolResponse(text=text), 0.0, metrics


class StatefulInteraction(BaseInteraction):
    """Keeps a conversation's state in `_instance_dict`, where subclasses find it, as in verl."""

    def __init__(self, config: dict[str, Any]):
        super().__init__(config)
        self._instance_dict: dict[str, dict[str, Any]] = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> str:
        """Begin a conversation."""
        instance_id = str(uuid.uuid4()) if instance_id is None else instance_id
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth, "reward": 0.0}
        return instance_id

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Forget a conversation. Raises `KeyError` for one that is not there."""
        del self._instance_dict[instance_id]


class Gsm8kInteraction(StatefulInteraction):
    """Asks again until the answer behind `####` is right. Its row's `interaction_kwargs` have the `ground_truth`."""

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Check the model's last message."""
        said = [message.get("content") for message in messages if message.get("role") == "assistant"]
        self._instance_dict[instance_id]["response"] = said[-1] if said else ""
        score = await self.calculate_score(instance_id)
        if score == 1.0:
            return True, "Your response is correct!", score, {}
        return False, "Your response is incorrect! You need to reflect on your answer and try again.", score, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """1 where the last answer is right. One that is no text, as a message without content, has none."""
        state = self._instance_dict[instance_id]
        return score_of(state["response"] or "", state["ground_truth"], "strict")


class WeatherInteraction(StatefulInteraction):
    """Ends after one turn, with the score 1 where a tool was called."""

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Look for a tool's result."""
        results = [message.get("content") for message in messages if message.get("role") == "tool"]
        self._instance_dict[instance_id]["response"] = results[-1] if results else NO_CALL
        score = await self.calculate_score(instance_id)
        if score == 1.0:
            return True, "Thank you for your weather query!", score, {}
        return True, "Please use the weather tool to get the weather information.", score, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """1 where a tool was called."""
        return 0.0 if self._instance_dict[instance_id]["response"] == NO_CALL else 1.0

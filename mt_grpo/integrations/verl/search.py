"""Search-R1's protocol, which verl's `SearchTool` speaks: `POST {"queries", "topk", "return_scores"}`.

The answer is `{"result": [[{"document": {"contents": "title\ntext"}, "score": 1.0}, ...], ...]}`, a list per query.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import requests

from mt_grpo.base.errors import tell_once

ATTEMPTS = 10
SENT_AGAIN = (500, 502, 503, 504)


def perform_single_search_batch(
    retrieval_service_url: str,
    query_list: list[str],
    topk: int = 3,
    concurrent_semaphore: Any = None,
    timeout: float = 30,
) -> tuple[str, dict[str, Any]]:
    """(JSON with what was found as text, metrics) for queries. What fails is told in the text; nothing is raised."""
    metrics: dict[str, Any] = {
        "query_count": len(query_list),
        "queries": query_list,
        "status": "api_error",
        "total_results": 0,
        "api_request_error": None,
        "formatted_result": None,
    }
    with concurrent_semaphore or contextlib.nullcontext():
        answer, error = call_search_api(retrieval_service_url, query_list, topk, timeout=timeout)
    if error:
        tell_once(f"A search failed, and the model reads the error as its result: {error}.", retrieval_service_url)
        metrics["api_request_error"] = error
        return as_json(f"Search error: {error}"), metrics
    try:
        found = answer["result"]
        text = "\n---\n".join(passages(each) for each in found)
        metrics["total_results"] = sum(map(len, found))
    except (KeyError, TypeError, AttributeError) as raised:
        tell_once(f"The answer of {retrieval_service_url} is not Search-R1's. The model reads this as its result.")
        metrics.update(status="processing_error", api_request_error=f"{type(raised).__name__}: {raised}")
        return as_json(f"Search error: the answer of {retrieval_service_url} is not Search-R1's."), metrics
    metrics.update(status="success" if metrics["total_results"] else "no_results", formatted_result=text)
    return as_json(text if metrics["total_results"] else "No search results found."), metrics


def call_search_api(
    retrieval_service_url: str, query_list: list[str], topk: int = 3, return_scores: bool = True, timeout: float = 30
) -> tuple[dict | None, str | None]:
    """(the service's answer, None) or (None, what went wrong). A service that is busy is asked ten times."""
    payload = {"queries": query_list, "topk": topk, "return_scores": return_scores}
    error = ""
    for attempt in range(ATTEMPTS):
        try:
            response = requests.post(retrieval_service_url, json=payload, timeout=timeout)
            if response.status_code not in SENT_AGAIN:
                response.raise_for_status()
                return response.json(), None
            error = f"{retrieval_service_url} answered with status {response.status_code}"
        except (requests.exceptions.ConnectionError, requests.exceptions.Timeout) as raised:
            error = f"{type(raised).__name__}: {raised}"
        except requests.exceptions.RequestException as raised:  # another status, or an answer that is no JSON
            return None, f"{type(raised).__name__}: {raised}"
        if attempt < ATTEMPTS - 1:
            time.sleep(attempt + 1)
    return None, f"{error} ({ATTEMPTS} attempts)"


def passages(found: list[dict[str, Any]]) -> str:
    r"""Format the passages that a query found as text.

    >>> passages([{"document": {"contents": "Paris\nA city."}, "score": 1.0}, {"document": {"contents": "Rome"}}])
    'Doc 1 (Title: Paris)\nA city.\n\nDoc 2 (Title: Rome)'
    """
    texts = []
    for number, each in enumerate(found, 1):
        title, _, text = each["document"]["contents"].partition("\n")
        texts.append(f"Doc {number} (Title: {title})\n{text}\n\n")
    return "".join(texts).strip()


def as_json(text: str) -> str:
    """A result as the tool gives it."""
    return json.dumps({"result": text}, ensure_ascii=False)

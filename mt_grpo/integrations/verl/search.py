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
    """(JSON with the results as text, metrics) of queries. A failure is told in the text; nothing is raised."""
    metrics: dict[str, Any] = {"query_count": len(query_list), "total_results": 0, "api_request_error": None}
    try:
        with concurrent_semaphore or contextlib.nullcontext():
            matches = ask(retrieval_service_url, query_list, topk, timeout)["result"]
        text = "\n---\n".join(passages(each) for each in matches)
        metrics["total_results"] = sum(map(len, matches))
    except Exception as raised:
        error = f"the search service failed ({type(raised).__name__})"  # its address may hold a password
        tell_once(f"A search failed, and the model reads the error as its result: {error}.", retrieval_service_url)
        metrics.update(status="api_error", api_request_error=error)
        return as_json(f"Search error: {error}"), metrics
    metrics["status"] = "success" if metrics["total_results"] else "no_results"
    return as_json(text if metrics["total_results"] else "No search results found."), metrics


def ask(url: str, queries: list[str], topk: int, timeout: float) -> dict[str, Any]:
    """The answer of the service, which is asked ten times if it is busy. Raises what it failed with."""
    for seconds in range(1, ATTEMPTS + 1):
        try:
            payload = {"queries": queries, "topk": topk, "return_scores": True}
            response = requests.post(url, json=payload, timeout=timeout)
            response.raise_for_status()
            return response.json()
        except (requests.ConnectionError, requests.Timeout, requests.HTTPError) as error:
            busy = error.response is None or error.response.status_code in SENT_AGAIN
            if not busy or seconds == ATTEMPTS:
                raise
        time.sleep(seconds)


def passages(matches: list[dict[str, Any]]) -> str:
    r"""Format the matches of a query as text.

    >>> passages([{"document": {"contents": "Paris\nA city."}, "score": 1.0}, {"document": {"contents": "Rome"}}])
    'Doc 1 (Title: Paris)\nA city.\n\nDoc 2 (Title: Rome)'
    """
    texts = []
    for number, match in enumerate(matches, 1):
        title, _, text = match["document"]["contents"].partition("\n")
        texts.append(f"Doc {number} (Title: {title})\n{text}\n\n")
    return "".join(texts).strip()


def as_json(text: str) -> str:
    """A result as the tool returns it."""
    return json.dumps({"result": text}, ensure_ascii=False)

"""Serve one search index to many trainers: BM25 over HTTP, in the protocol of Search-R1.

    python scripts/serve_search.py --corpus corpus.jsonl

The corpus has a JSON object with the strings `id`, `title` and `text` on each line. The index is that of
tools/wiki_search.py: SQLite's FTS5, built before the server answers, in the file `<corpus>.fts5`. Who asks:

- `tools/wiki_search.py` with WIKI_SEARCH_BACKEND=retrieval and WIKI_SEARCH_URL=http://127.0.0.1:8000
- verl's `SearchTool` with `retrieval_service_url: http://127.0.0.1:8000/retrieve` (docs/verl.md)

    POST /retrieve  {"queries": ["..."], "topk": 3, "return_scores": true}
    answer          {"result": [[{"document": {"contents": "title\\ntext"}, "score": 1.0}, ...], ...]}
    GET /health     200 as soon as there is an index

There is no password: it listens on this machine alone unless --host says otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aiohttp import web

ROOT = Path(__file__).resolve().parents[1]
MOST_QUERIES = 256  # of a request
MOST_PASSAGES = 100  # of a query
MOST_BYTES = 2**20  # of a request


def application(search: types.ModuleType) -> web.Application:
    """Answers requests in threads, each with its own connection to the index, by tools/wiki_search.py (`search`)."""
    pool = ThreadPoolExecutor(max(4, os.cpu_count() or 4), thread_name_prefix="search")

    def passages(query: str, topk: int) -> list[dict[str, Any]]:
        """The best passages of one query, best first. The score is BM25's, higher is better."""
        return [
            {"document": {"id": key, "contents": f"{title}\n{text}"}, "score": -rank}
            for key, title, text, rank in search.ranked(query, topk)
        ]

    async def retrieve(request: web.Request) -> web.Response:
        """Answer with a list of passages per query. An invalid request gets status 400 and what was expected."""
        try:
            body = await request.json()
            queries = body.get("queries") if isinstance(body, dict) else None
            if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
                raise ValueError('expected {"queries": ["..."], "topk": 3, "return_scores": true}')
            topk = 3 if body.get("topk") is None else body["topk"]
            if not isinstance(topk, int) or not 1 <= topk <= MOST_PASSAGES:
                raise ValueError(f"topk is {topk!r}, expected a number from 1 to {MOST_PASSAGES}")
            if len(queries) > MOST_QUERIES:
                raise ValueError(f"{len(queries)} queries, expected at most {MOST_QUERIES}")
        except ValueError as error:
            return web.json_response({"error": f"{error}"}, status=400)
        loop = asyncio.get_running_loop()
        found = await asyncio.gather(*(loop.run_in_executor(pool, passages, query, topk) for query in queries))
        if not body.get("return_scores"):
            found = [[passage["document"] for passage in each] for each in found]
        return web.json_response({"result": found})

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app = web.Application(client_max_size=MOST_BYTES)
    app.add_routes([web.post("/retrieve", retrieve), web.get("/health", health)])
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", required=True, help="A JSONL file with id, title and text")
    parser.add_argument("--index", help="The index file. Default: next to the corpus")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    os.environ["WIKI_SEARCH_CORPUS"] = args.corpus
    if args.index:
        os.environ["WIKI_SEARCH_INDEX"] = args.index
    spec = importlib.util.spec_from_file_location("wiki_search", ROOT / "tools/wiki_search.py")
    search = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(search)
    try:
        search.ranked("test", 1)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    print(f"{args.corpus} is served on http://{args.host}:{args.port}/retrieve", flush=True)
    web.run_app(application(search), host=args.host, port=args.port, print=None)


if __name__ == "__main__":
    main()

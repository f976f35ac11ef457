"""Search in Wikipedia, or in any collection of titled passages: in a file, or on a server.

Needs: `requests`, and for the local backend an SQLite with FTS5 (Python's own has it). Environment variables, read at
every call, choose the backend:

| variable | meaning | default |
|---|---|---|
| `WIKI_SEARCH_BACKEND` | `local` or `retrieval` | `local` |
| `WIKI_SEARCH_CORPUS` | local: JSON lines with `id`, `title`, `text`, of scripts/build/wiki_corpus.py | required |
| `WIKI_SEARCH_INDEX` | local: the index file, if the corpus' folder cannot be written to | `<corpus>.fts5` |
| `WIKI_SEARCH_URL` | retrieval: the server, with or without `/retrieve` | required |
| `WIKI_SEARCH_TOPK` | passages per search, 1 to 20 | 1 |

- `local` ranks the corpus by BM25 in an SQLite index, which the first search builds, and builds again if the corpus'
  size or time of change differs. Processes that start together build it once. The trainer makes one search before it
  loads a model. By hand: `WIKI_SEARCH_CORPUS=corpus.jsonl python tools/wiki_search.py "any words"`.
- `retrieval` asks a server that speaks the protocol of Search-R1 (scripts/serve_search.py).

A result has whole passages in the order of their rank, as many as fit into `MAX_RESULT_CHARS`. The last one is
truncated if a useful part of it remains: more passages never push a better one out.

Protects against: search syntax in a query (local), long results and queries, servers that are busy (429 and 5xx are
retried), hang, or answer with something else or with more passages than requested; half-built indexes; an index path
that names another file. Errors do not show the credentials of `WIKI_SEARCH_URL`.

Does not protect against: the contents of passages, which reach the model unchanged, with any instructions or tags in
them; others who may write to the folder of the index; a server that sends data endlessly.
"""

import contextlib
import fcntl
import json
import os
import re
import sqlite3
import sys
import tempfile
import threading
import unicodedata
import warnings
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3.util.retry import Retry

MAX_RESULT_CHARS = 3000  # per result, all passages together; about 750 tokens of English
MIN_CUT_CHARS = 300  # a passage is left out if less of it would fit, unless it is the only one
MAX_QUERY_CHARS = 300  # the rest of a longer query is dropped
MAX_TOPK = 20

TITLE_WEIGHT = 2.0  # a word in the title counts as much as this many in the text
INDEX_VERSION = 1  # raise it when the index' layout changes: older indexes are then rebuilt

CONNECT_TIMEOUT = 5.0  # seconds
READ_TIMEOUT = 20.0  # seconds without a byte from the server
ATTEMPTS = 3  # requests in total, including the first
RETRY_STATUSES = (429, 500, 502, 503, 504)
BACKOFF_SECONDS = 0.5  # wait before the third attempt, in units of two; the second follows at once

# Words of almost every passage, which say nothing about its topic and make a search in a large corpus slow.
STOP_WORDS = (
    "a an and are as at be been by did do does for from had has have how in into is it its of on or that the their "
    "this to was were what when where which who whom whose why with"
)

_THREAD = threading.local()  # each thread's own connection to the index and its own HTTP session


def wiki_search(query: str) -> str:
    """Search Wikipedia for passages about a topic.

    Args:
        query: A few words that name what you look for, for example Norman conquest of England

    Returns:
        The best matching passages, each with its title where it has one.
    """
    query = _clean_query(query)
    backends = {"local": _search_local, "retrieval": _search_retrieval}
    backend, topk = os.environ.get("WIKI_SEARCH_BACKEND") or "local", os.environ.get("WIKI_SEARCH_TOPK") or "1"
    if backend not in backends:
        raise ValueError(f"WIKI_SEARCH_BACKEND is {backend!r}; set it to one of {', '.join(backends)}")
    if not 1 <= int(topk) <= MAX_TOPK:
        raise ValueError(f"WIKI_SEARCH_TOPK is {topk}; set it to a number from 1 to {MAX_TOPK}")
    passages = backends[backend](query, int(topk))
    # Without the query, since an answer that the model only guessed in it would count as found.
    return _format(passages) if passages else "No results. Try other words."


# --- query and result ------------------------------------------------------------------------------------------------


def _clean_query(query: str) -> str:
    """Return the query as one line of valid Unicode, at most MAX_QUERY_CHARS long."""
    query = query.encode("utf-8", "replace").decode("utf-8").replace("\0", " ")  # no lone surrogates
    query = " ".join(unicodedata.normalize("NFC", query).split())[:MAX_QUERY_CHARS].rstrip()
    if not query:
        raise ValueError("empty query: pass a few words to search for")
    return query


def _format(passages: list[tuple[str, str]]) -> str:
    """Number the (title, text) pairs and join them, best first, while they fit into MAX_RESULT_CHARS.

    One that is alone and has no title stands as it is: a number would be one more thing to copy.

    >>> _format([("Normans", "Rollo led.")]), _format([("", "Rollo led.")]), _format([("", "One."), ("Two", "2")])
    ('[1] Normans\\nRollo led.', 'Rollo led.', '[1] One.\\n\\n[2] Two\\n2')
    """
    result = ""
    for i, (title, text) in enumerate(passages, 1):
        mark = f"[{i}] " if title or len(passages) > 1 else ""
        block = f"{mark}{title}\n{text}".strip() if title else mark + text
        separator = "\n\n" if result else ""
        room = MAX_RESULT_CHARS - len(result) - len(separator)
        if len(block) > room and result and room < MIN_CUT_CHARS:
            break
        result += separator + _cut(block, room)
        if len(block) > room:
            break
    return result


def _cut(text: str, limit: int) -> str:
    """Truncate a text to `limit` characters, including a marker."""
    if len(text) <= limit:
        return text
    marker = f" ... [cut, {len(text)} characters in all]"
    return text[: max(0, limit - len(marker))].rstrip() + marker


# --- local: SQLite FTS5 ----------------------------------------------------------------------------------------------


def _search_local(query: str, topk: int) -> list[tuple[str, str]]:
    return [(title, text) for _, title, text, _ in ranked(query, topk)]


def ranked(query: str, topk: int) -> list[tuple[str, str, str, float]]:
    """Return (id, title, text, BM25 rank) of the best passages of the local corpus, best (lowest rank) first."""
    words = {word.lower(): word for word in re.findall(r"\w+", query)}  # lower() gives some letters an accent apart
    chosen = [word for lower, word in words.items() if lower not in STOP_WORDS.split()] or words.values()
    # INVARIANT: a word holds no quotation mark, so that the quotes leave no FTS syntax of the query alive.
    match = " OR ".join(f'"{word}"' for word in chosen)
    if not match:
        return []
    rows = _index().execute(
        "SELECT id, title, text, rank FROM passages WHERE passages MATCH ? ORDER BY rank LIMIT ?", (match, topk)
    )
    return rows.fetchall()


def _index() -> sqlite3.Connection:
    """Return this thread's read-only connection to an up-to-date index of the corpus."""
    corpus = os.environ.get("WIKI_SEARCH_CORPUS")
    if not corpus:
        raise ValueError("WIKI_SEARCH_CORPUS is not set: set it to a JSONL file with id, title and text")
    if not os.path.exists(os.path.expanduser(corpus)):
        raise FileNotFoundError(
            f"WIKI_SEARCH_CORPUS: {corpus} does not exist. The recipe's first lines have the command that makes it "
            "(scripts/build/wiki_corpus.py)"
        )
    corpus = Path(corpus).expanduser().absolute()
    index = Path(os.environ.get("WIKI_SEARCH_INDEX") or f"{corpus}.fts5").expanduser().absolute()
    state = _state(corpus)
    key = (os.getpid(), index, state)  # a fork needs a connection of its own
    if getattr(_THREAD, "index_key", None) != key:
        if _stored_state(index) != state:
            index.parent.mkdir(parents=True, exist_ok=True)
            with open(f"{index}.lock", "w") as lock:
                with contextlib.suppress(OSError):  # a file system without locks: built more than once, still whole
                    fcntl.flock(lock, fcntl.LOCK_EX)
                if _stored_state(index) != state:  # nobody built it while this thread waited for the lock
                    _build_index(corpus, index)
        _THREAD.index, _THREAD.index_key = _connect(index), key
    return _THREAD.index


def _state(corpus: Path | int) -> str:
    """Return the state of a corpus (a path or an open file) from which an up-to-date index was built."""
    stat = os.stat(corpus)
    return f"version {INDEX_VERSION}, {stat.st_size} bytes, changed {stat.st_mtime_ns} ns"


def _stored_state(index: Path) -> str | None:
    """Return the state that an index was built from, None if there is no index yet."""
    if not index.exists():
        return None
    try:
        with contextlib.closing(_connect(index)) as connection:
            return connection.execute("SELECT state FROM built_from").fetchone()[0]
    except sqlite3.Error as error:  # never overwrite a file that this tool did not write
        raise ValueError(
            f"{index} is not an index of this tool ({error}): delete it or set WIKI_SEARCH_INDEX"
        ) from None


def _connect(index: Path) -> sqlite3.Connection:
    # INVARIANT: an index is replaced as a whole and never written to, hence immutable (no locks, read-only disks).
    return sqlite3.connect(f"{index.as_uri()}?mode=ro&immutable=1", uri=True)


def _build_index(corpus: Path, index: Path) -> None:
    """Build the index in a folder of its own, and give it its name when it is whole."""
    with tempfile.TemporaryDirectory(prefix=f"{index.name}.", dir=index.parent) as folder:
        temporary = os.path.join(folder, "index")
        with contextlib.closing(sqlite3.connect(temporary)) as connection, open(corpus, encoding="utf-8") as file:
            connection.executescript(
                f"""
                PRAGMA journal_mode = OFF;
                PRAGMA synchronous = OFF;
                CREATE TABLE built_from (state TEXT);
                CREATE VIRTUAL TABLE passages
                    USING fts5(id UNINDEXED, title, text, tokenize = "porter unicode61 remove_diacritics 2");
                INSERT INTO passages (passages, rank) VALUES ('rank', 'bm25(0.0, {TITLE_WEIGHT}, 1.0)');
                """
            )
            connection.execute("INSERT INTO built_from VALUES (?)", (_state(file.fileno()),))
            connection.executemany("INSERT INTO passages (id, title, text) VALUES (?, ?, ?)", _rows(corpus, file))
            connection.execute("INSERT INTO passages (passages) VALUES ('optimize')")
            connection.commit()
        os.replace(temporary, index)


def _rows(corpus: Path, lines: Iterator[str]) -> Iterator[list[str]]:
    number = 0
    for number, line in enumerate(lines, 1):
        try:
            fields = [json.loads(line)[key] for key in ("id", "title", "text")]
        except (ValueError, TypeError, KeyError):
            fields = [None]
        if not all(isinstance(field, str) for field in fields):
            raise ValueError(
                f"{corpus}, line {number}: expected a JSON object with the strings id, title and text, "
                f"got {_cut(line.strip(), 100)!r}"
            )
        yield fields
    if not number:
        raise ValueError(f"{corpus} is empty: expected a JSON object with id, title and text in each line")


# --- retrieval: HTTP -----------------------------------------------------------------------------------------------


def _search_retrieval(query: str, topk: int) -> list[tuple[str, str]]:
    """Ask the server. Errors show its URL without credentials and query."""
    url = (os.environ.get("WIKI_SEARCH_URL") or "").rstrip("/").removesuffix("/retrieve") + "/retrieve"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise ValueError("WIKI_SEARCH_URL is not set to a server with http:// or https://, e.g. http://127.0.0.1:8000")
    where = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    body = {"queries": [query], "topk": topk, "return_scores": True}
    try:
        response = _session().post(url, json=body, timeout=(CONNECT_TIMEOUT, READ_TIMEOUT))
    except requests.RequestException as error:
        kind = type(getattr(error.args[0], "reason", error)).__name__  # of urllib3's last try
        raise ConnectionError(
            f"no answer from {where} ({kind}): check that it is running and WIKI_SEARCH_URL"
        ) from None
    try:
        response.raise_for_status()
        (found,) = response.json()["result"]  # one list per query
        passages = [item["document"]["contents"].partition("\n") for item in found[:topk]]
        # Search-R1's own corpus has quotation marks around titles.
        return [(re.sub(r'^"(.*)"$', r"\1", head.strip()), text) if text else ("", head) for head, _, text in passages]
    except (requests.HTTPError, KeyError, TypeError, ValueError, AttributeError):
        said = f"status {response.status_code} and {_cut(response.text.strip(), 200)!r}"
        raise RuntimeError(
            f"{where} answered with {said}: check the server's log, WIKI_SEARCH_URL and WIKI_SEARCH_BACKEND"
        ) from None


def _session() -> requests.Session:
    if getattr(_THREAD, "session_pid", None) != os.getpid():  # a fork must not share connections
        session = requests.Session()
        retry = Retry(
            total=ATTEMPTS - 1,
            read=0,  # a request that timed out is not sent again
            status_forcelist=RETRY_STATUSES,
            allowed_methods=None,  # POST too: a search changes nothing
            raise_on_status=False,  # the last answer comes back, with its status
            respect_retry_after_header=False,  # it may name hours
            backoff_factor=BACKOFF_SECONDS,
            backoff_jitter=BACKOFF_SECONDS,  # apart, if many met the limit together
        )
        for scheme in ("http://", "https://"):
            session.mount(scheme, HTTPAdapter(max_retries=retry))
        _THREAD.session, _THREAD.session_pid = session, os.getpid()
    return _THREAD.session


def check_search() -> None:
    """Check the settings and the server before training, and build a local index. Raises if they are wrong."""
    found = not wiki_search("history of the world").startswith("No results")
    if not found and os.environ.get("WIKI_SEARCH_BACKEND") == "retrieval":
        warnings.warn("No results for common words: check that the server has indexed its corpus", stacklevel=2)


TOOL_FUNCTIONS = [wiki_search]
CHECK_TOOLS = check_search

if __name__ == "__main__":
    print(wiki_search(" ".join(sys.argv[1:])))

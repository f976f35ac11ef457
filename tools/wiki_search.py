"""Search in Wikipedia, or in any collection of titled passages, with one of three backends.

Needs: `requests`, and for the local backend an SQLite with FTS5 (Python's own has it). Environment variables choose
the backend. They are read at every call:

| variable | meaning | default |
|---|---|---|
| `WIKI_SEARCH_BACKEND` | `local`, `mediawiki` or `retrieval` | `local` |
| `WIKI_SEARCH_CORPUS` | local: a JSONL file whose rows have the strings `id`, `title` and `text` | required |
| `WIKI_SEARCH_INDEX` | local: the index file | `<corpus>.fts5`, or in `~/.cache/wiki_search` if not writable |
| `WIKI_SEARCH_URL` | mediawiki: the `api.php` of a wiki | English Wikipedia's |
| | retrieval: the server, with or without `/retrieve` | required |
| `WIKI_SEARCH_TOPK` | passages per search, 1 to 20 | 1 |
| `WIKI_SEARCH_USER_AGENT` | how HTTP requests name themselves; Wikipedia asks for a way to reach you | `USER_AGENT` |

- `local` ranks the corpus by BM25 in an SQLite index that is built at the first search and rebuilt when the corpus'
  size or time of change differs. Processes that start together build it once; the others wait (the file
  `<index>.lock` stays). The trainer makes one search before it loads a model, so that wrong settings end the run there
  and a large corpus is indexed outside the time limit of a tool call. To build the index by hand:
  `WIKI_SEARCH_CORPUS=corpus.jsonl python tools/wiki_search.py "any words"`.
- `mediawiki` asks the API of Wikipedia, or of another wiki, and returns the introductions of the pages found. The
  extension CirrusSearch (Wikipedia has it) ranks pages by all words of the query. MediaWiki's own search wants every
  word and does not rank: there, one request per word finds the pages with the most and the rarest words. The wiki
  needs the extension TextExtracts. Wikipedia is rate-limited: for trying things out, not for training.
- `retrieval` asks a server that speaks the protocol of Search-R1: `POST /retrieve` with
  `{"queries": [...], "topk": k, "return_scores": true}`, answered by
  `{"result": [[{"document": {"contents": "title\\ntext"}, "score": s}]]}`.

A result has whole passages in the order of their rank, as many as fit into `MAX_RESULT_CHARS`. The last one is
truncated if a useful part of it remains, and the rest is left out: more passages never push a better one out. A title
may be empty.

Protects against: search syntax in a query (local), overlong results (`MAX_RESULT_CHARS`) and queries
(`MAX_QUERY_CHARS`), servers that are busy (429 and 5xx are retried), that hang before their answer or between two
parts of it (time limits), that answer with something else or with more passages than asked for; half-built indexes; an
index path that names another file. Credentials in `WIKI_SEARCH_URL` are not shown in errors.

Does not protect against: the contents of passages. They reach the model unchanged, with any instructions or tags that
they contain. Nor against others who may write to the folder of the index, a server that sends data endlessly, or
CirrusSearch's own syntax in a query (it can only search).

Errors: "nothing found" is a result. A wrong setting, corpus or server raises an error that says what to do.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
import random
import re
import sqlite3
import sys
import tempfile
import threading
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3.exceptions import InvalidHeader, ReadTimeoutError
from urllib3.util.retry import Retry

try:
    import fcntl
except ImportError:  # not POSIX: processes that start together each build the index, the last one stays
    fcntl = None


MAX_RESULT_CHARS = 3000  # per result, all passages together; about 750 tokens of English
MIN_CUT_CHARS = 300  # a passage is left out if less of it would fit, unless it is the only one
MAX_QUERY_CHARS = 300  # MediaWiki's own limit; the rest of a longer query is dropped
MAX_QUERY_WORDS = 12  # mediawiki without CirrusSearch: the longest words, one request each
MAX_HITS = 500  # mediawiki without CirrusSearch: pages per word, the API's own limit
MAX_TOPK = 20  # MediaWiki gives at most 20 extracts

TITLE_WEIGHT = 2.0  # a word in the title counts as much as this many in the text
INDEX_VERSION = 1  # raise it when the index' layout changes: older indexes are then rebuilt

MEDIAWIKI_URL = "https://en.wikipedia.org/w/api.php"
USER_AGENT = "mt-grpo-wiki-search/1.0 (search tool of a research project) python-requests"
CONNECT_TIMEOUT = 5.0  # seconds
READ_TIMEOUT = 20.0  # seconds without a byte from the server
ATTEMPTS = 3  # requests in total, including the first
RETRY_STATUSES = (429, 500, 502, 503, 504)
BACKOFF_SECONDS = 0.5  # wait before the second attempt; doubles with each further one
MAX_WAIT_SECONDS = 10.0  # limit of every wait, also of one that the server requests with Retry-After

# Words of almost every passage, which say nothing about its topic and make a search in a large corpus slow.
STOP_WORDS = (
    "a an and are as at be been by did do does for from had has have how in into is it its of on or that the their "
    "this to was were what when where which who whom whose why will with"
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
    backends = {"local": _search_local, "mediawiki": _search_mediawiki, "retrieval": _search_retrieval}
    backend = os.environ.get("WIKI_SEARCH_BACKEND") or "local"
    if backend not in backends:
        raise ValueError(f"WIKI_SEARCH_BACKEND is {backend!r}; set it to one of {', '.join(backends)}")
    passages = backends[backend](query, _topk())
    # Without the query, since an answer that the model only guessed in it would count as found.
    return _format(passages) if passages else "No results. Try other words."


# --- query and result ------------------------------------------------------------------------------------------------


def _clean_query(query: str) -> str:
    """Return the query as one line of valid Unicode, at most MAX_QUERY_CHARS long."""
    if not isinstance(query, str):
        raise TypeError(f"query must be a string, got {type(query).__name__}")
    query = query.encode("utf-8", "replace").decode("utf-8").replace("\0", " ")  # no lone surrogates
    query = " ".join(unicodedata.normalize("NFC", query).split())[:MAX_QUERY_CHARS].rstrip()
    if not query:
        raise ValueError("empty query: pass a few words to search for")
    return query


def _topk() -> int:
    value = os.environ.get("WIKI_SEARCH_TOPK") or "1"
    if not (value.isascii() and value.isdigit() and 1 <= int(value) <= MAX_TOPK):
        raise ValueError(f"WIKI_SEARCH_TOPK is {value!r}; set it to a number from 1 to {MAX_TOPK}")
    return int(value)


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


def _content_words(query: str) -> list[str]:
    """Return the distinct words of a query, without stop words unless it has no others."""
    words = list(dict.fromkeys(re.findall(r"\w+", query.lower())))
    return [word for word in words if word not in STOP_WORDS.split()] or words


# --- local: SQLite FTS5 ----------------------------------------------------------------------------------------------


def _search_local(query: str, topk: int) -> list[tuple[str, str]]:
    return [(title, text) for _, title, text, _ in ranked(query, topk)]


def ranked(query: str, topk: int) -> list[tuple[str, str, str, float]]:
    """Return (id, title, text, BM25 rank) of the best passages of the local corpus, best (lowest rank) first."""
    words = _content_words(query)
    if not words:
        return []
    # INVARIANT: a word holds no quotation mark, so that the quotes leave no FTS syntax of the query alive.
    match = " OR ".join(f'"{word}"' for word in words)
    rows = _index().execute(
        "SELECT id, title, text, rank FROM passages WHERE passages MATCH ? ORDER BY rank LIMIT ?", (match, topk)
    )
    return rows.fetchall()


def _index() -> sqlite3.Connection:
    """Return this thread's read-only connection to an up-to-date index of the corpus."""
    corpus = _corpus_path()
    state = _index_state(corpus)
    key = (os.getpid(), corpus, os.environ.get("WIKI_SEARCH_INDEX"), state)  # a fork needs a connection of its own
    if getattr(_THREAD, "index_key", None) != key:
        index = _index_path(corpus, state)
        if _stored_state(index) != state:
            with _lock(index):
                if _stored_state(index) != state:  # nobody built it while this thread waited for the lock
                    _build_index(corpus, index)
        _THREAD.index, _THREAD.index_key = _connect(index), key
    return _THREAD.index


def _corpus_path() -> Path:
    value = os.environ.get("WIKI_SEARCH_CORPUS")
    if not value:
        raise ValueError(
            "WIKI_SEARCH_CORPUS is not set: set it to a JSONL file with id, title and text, "
            "or choose another WIKI_SEARCH_BACKEND (mediawiki, retrieval)"
        )
    corpus = Path(value).expanduser().absolute()
    if not corpus.is_file():
        raise FileNotFoundError(f"WIKI_SEARCH_CORPUS names {corpus}, which is not a file")
    return corpus


def _index_path(corpus: Path, state: str) -> Path:
    if value := os.environ.get("WIKI_SEARCH_INDEX"):
        return Path(value).expanduser().absolute()
    beside = corpus.with_name(corpus.name + ".fts5")
    if os.access(corpus.parent, os.W_OK) or _stored_state(beside) == state:
        return beside
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wiki_search"
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    return cache / f"{corpus.stem}-{hashlib.sha256(str(corpus).encode()).hexdigest()[:16]}.fts5"


def _index_state(corpus: Path | int) -> str:
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
            f"{index} is not an index of this tool ({error}): delete it or set WIKI_SEARCH_INDEX to another path"
        ) from None


def _connect(index: Path) -> sqlite3.Connection:
    # INVARIANT: an index is replaced as a whole and never written to, hence immutable (no locks, read-only disks).
    return sqlite3.connect(f"{index.as_uri()}?mode=ro&immutable=1", uri=True)


@contextlib.contextmanager
def _lock(index: Path) -> Iterator[None]:
    """Context manager in which one thread of one process at a time builds this index."""
    index.parent.mkdir(parents=True, exist_ok=True)
    if not fcntl:
        yield
        return
    with open(f"{index}.lock", "w") as lock:
        with contextlib.suppress(OSError):  # a file system without locks: built more than once, still whole
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build_index(corpus: Path, index: Path) -> None:
    handle, temporary = tempfile.mkstemp(prefix=f"{index.name}.", suffix=".tmp", dir=index.parent)
    try:
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
            connection.execute("INSERT INTO built_from VALUES (?)", (_index_state(file.fileno()),))
            connection.executemany("INSERT INTO passages (id, title, text) VALUES (?, ?, ?)", _rows(corpus, file))
            connection.execute("INSERT INTO passages (passages) VALUES ('optimize')")
            connection.commit()
        os.chmod(temporary, 0o644)
        os.fsync(handle)
        os.replace(temporary, index)
    except BaseException:
        os.unlink(temporary)
        raise
    finally:
        os.close(handle)


def _rows(corpus: Path, lines: Iterator[str]) -> Iterator[tuple[str, str, str]]:
    number = 0
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            fields = row["id"], row["title"], row["text"]
        except (ValueError, TypeError, KeyError):
            fields = ()
        if not fields or not all(isinstance(field, str) for field in fields):
            raise ValueError(
                f"{corpus}, line {number}: expected a JSON object with the strings id, title and text, "
                f"got {_cut(line.strip(), 100)!r}"
            )
        yield fields
    if not number:
        raise ValueError(f"{corpus} is empty: expected a JSON object with id, title and text in each line")


# --- mediawiki and retrieval: HTTP -----------------------------------------------------------------------------------


def _search_mediawiki(query: str, topk: int) -> list[tuple[str, str]]:
    words = _content_words(query)
    if "CirrusSearch" in _extensions(_mediawiki_url()):
        titles = _hits(query, topk)[0]
        if not titles and len(words) > 1:
            titles = _hits(" OR ".join(words), topk)[0]
    else:
        titles = _titles_by_words(words)
    return _texts(titles[:topk])


def _titles_by_words(words: list[str]) -> list[str]:
    """Return the titles of pages with any of the words, those with the most and the rarest words first."""
    words = sorted(words, key=len, reverse=True)[:MAX_QUERY_WORDS]
    searches = dict.fromkeys([" ".join(words), *words]) if words else []  # the first one wants every word
    hits = [_hits(search, MAX_HITS) for search in searches]
    most = max((total for _, total in hits), default=0)
    scores = {}
    for titles, total in hits:
        for title in titles:
            scores[title] = scores.get(title, 0.0) + math.log(1 + most / total)  # inverse document frequency
    return sorted(scores, key=scores.get, reverse=True)


def _hits(search: str, limit: int) -> tuple[list[str], int]:
    """Return the titles of at most `limit` pages whose text matches, and the number of all such pages."""

    def read(answer: dict) -> tuple[list[str], int]:
        titles = [hit["title"] for hit in answer["search"]]
        return titles, max(len(titles), answer.get("searchinfo", {}).get("totalhits", 0))

    # Without srwhat, MediaWiki's own search looks at the titles alone.
    return _ask_mediawiki(read, list="search", srsearch=search, srwhat="text", srnamespace=0, srlimit=limit)


def _texts(titles: list[str]) -> list[tuple[str, str]]:
    """Return (title, introduction) of the pages that have a text, in the given order; a redirect is followed."""

    def read(answer: dict) -> list[tuple[str, str]]:
        targets = {redirect["from"]: redirect["to"] for redirect in answer.get("redirects", [])}
        texts = {page["title"]: page.get("extract", "").strip() for page in answer["pages"]}  # in order of page id
        names = dict.fromkeys(targets.get(title, title) for title in titles)
        return [(name, texts[name]) for name in names if texts.get(name)]

    extracts = {"prop": "extracts", "exintro": 1, "explaintext": 1, "exlimit": len(titles)}
    return _ask_mediawiki(read, titles="|".join(titles), redirects=1, **extracts) if titles else []


@functools.cache
def _extensions(url: str) -> frozenset[str]:
    """Return the names of a wiki's extensions, requested once per process."""
    params = {"meta": "siteinfo", "siprop": "extensions"}
    return _ask_mediawiki(lambda answer: frozenset(extension["name"] for extension in answer["extensions"]), **params)


def _mediawiki_url() -> str:
    return os.environ.get("WIKI_SEARCH_URL") or MEDIAWIKI_URL


def _ask_mediawiki(read: Callable[[dict], Any], **params) -> Any:
    """Return `read` of the API's answer. Raises on an error, and on an answer that `read` cannot read."""
    url = _mediawiki_url()
    params = {"action": "query", "format": "json", "formatversion": 2, **params}
    answer = _fetch("MediaWiki API", "GET", url, params=params)
    try:
        if "error" in answer:  # with status 200
            raise RuntimeError(
                f"the MediaWiki API at {_shown(url)} answered the error {answer['error']['code']!r}: "
                f"{_cut(str(answer['error'].get('info')), 200)}; check WIKI_SEARCH_URL or search less often"
            )
        return read(answer["query"])
    except (KeyError, TypeError, AttributeError):
        asked = params.get("list") or params.get("meta") or "pages"
        raise _unexpected("MediaWiki API", url, f"with query.{asked}", answer) from None


def _search_retrieval(query: str, topk: int) -> list[tuple[str, str]]:
    url = os.environ.get("WIKI_SEARCH_URL")
    if not url:
        raise ValueError("WIKI_SEARCH_URL is not set: set it to the retrieval server, e.g. http://127.0.0.1:8000")
    url = url.rstrip("/")
    url = url if url.endswith("/retrieve") else f"{url}/retrieve"
    answer = _fetch("retrieval server", "POST", url, json={"queries": [query], "topk": topk, "return_scores": True})
    try:
        (found,) = answer["result"]  # one list per query
        passages = [item["document"]["contents"].partition("\n") for item in found]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise _unexpected("retrieval server", url, '{"result": [[{"document": ..}]]}', answer) from None
    return [(_unquote(head.strip()), text) if text else ("", head) for head, _, text in passages[:topk]]


def _unquote(title: str) -> str:
    """Remove the quotation marks around a title, as Search-R1's own corpus has them."""
    quoted = len(title) > 1 and title.startswith('"') and title.endswith('"')
    return title[1:-1] if quoted else title


def _fetch(server: str, method: str, url: str, **request) -> dict:
    """Send one request and return its JSON object. Any other answer raises an error that says what to do."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"WIKI_SEARCH_URL is {url.rpartition('@')[2]!r}; set it to a URL with http:// or https://")
    where = f"the {server} at {_shown(url)}"
    try:
        response = _session().request(method, url, timeout=(CONNECT_TIMEOUT, READ_TIMEOUT), **request)
    except requests.Timeout as error:
        seconds = CONNECT_TIMEOUT if isinstance(error, requests.ConnectTimeout) else READ_TIMEOUT
        raise TimeoutError(f"{where} did not answer within {seconds:g} s: check its load, or search again") from None
    except requests.RequestException as error:
        reason = error.args[0] if error.args else error
        reason = _cut(str(getattr(reason, "reason", reason)), 200)
        if isinstance(error, ValueError):  # about the URL, and would show all of it
            reason = type(error).__name__
        raise ConnectionError(
            f"no answer from {where} ({reason}): check that it is running and that WIKI_SEARCH_URL is right"
        ) from None
    if response.status_code != 200:
        tried = f" {ATTEMPTS} times" if response.status_code in RETRY_STATUSES else ""
        advice = "search less often" if response.status_code == 429 else "check the server's log and WIKI_SEARCH_URL"
        text = _cut(response.text.strip(), 200)
        raise RuntimeError(f"{where} answered{tried} with status {response.status_code} ({text}): {advice}")
    try:
        answer = response.json()
    except ValueError:
        answer = response.text
    if not isinstance(answer, dict):
        raise _unexpected(server, url, "", answer)
    return answer


def _unexpected(server: str, url: str, expected: str, answer: object) -> RuntimeError:
    return RuntimeError(
        f"the {server} at {_shown(url)} did not answer with a JSON object {expected}".rstrip()
        + f" but with {_cut(str(answer), 200)!r}: check that WIKI_SEARCH_URL and WIKI_SEARCH_BACKEND fit together"
    )


def _shown(url: str) -> str:
    """Return the URL without user, password and query, for messages that the model and the logs get."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _session() -> requests.Session:
    if getattr(_THREAD, "session_pid", None) != os.getpid():  # a fork must not share connections
        session = requests.Session()
        retry = _Retry(
            total=ATTEMPTS - 1,
            status_forcelist=RETRY_STATUSES,
            allowed_methods=None,  # POST too: a search changes nothing
            raise_on_status=False,  # the last answer comes back, with its status
        )
        for scheme in ("http://", "https://"):
            session.mount(scheme, HTTPAdapter(max_retries=retry))
        _THREAD.session, _THREAD.session_pid = session, os.getpid()
    _THREAD.session.headers["User-Agent"] = os.environ.get("WIKI_SEARCH_USER_AGENT") or USER_AGENT
    return _THREAD.session


class _Retry(Retry):
    """urllib3's retries with bounded waits. A request that timed out is not sent again."""

    def get_retry_after(self, response) -> float | None:
        try:
            seconds = super().get_retry_after(response)
        except InvalidHeader:
            return None
        return None if seconds is None else min(seconds, MAX_WAIT_SECONDS)

    def get_backoff_time(self) -> float:
        wait = BACKOFF_SECONDS * 2 ** (len(self.history) - 1)
        return min(MAX_WAIT_SECONDS, wait * random.uniform(0.5, 1.5))  # apart, if many met the limit together

    def increment(self, method=None, url=None, response=None, error=None, *args, **kwargs):
        if isinstance(error, ReadTimeoutError):
            raise error
        return super().increment(method, url, response, error, *args, **kwargs)


def check_search() -> None:
    """Check the settings and the server before training, and build a local index. Raises if a search has no text."""
    backend = os.environ.get("WIKI_SEARCH_BACKEND")
    if backend == "mediawiki" and "TextExtracts" not in _extensions(_mediawiki_url()):
        raise ValueError(
            f"the wiki at {_shown(_mediawiki_url())} has no extension TextExtracts: add wfLoadExtension( "
            "'TextExtracts' ); to its LocalSettings.php, or set WIKI_SEARCH_URL to another wiki"
        )
    if wiki_search("history of the world").startswith("No results") and backend in ("mediawiki", "retrieval"):
        warnings.warn("No results for common words: check that the server has indexed its corpus", stacklevel=2)


TOOL_FUNCTIONS = [wiki_search]
CHECK_TOOLS = check_search

if __name__ == "__main__":
    print(wiki_search(" ".join(sys.argv[1:])))

"""Files that name MCP servers, as their clients write them, as one form.

Claude Desktop, Claude Code, Cursor, Cline, Windsurf and Gemini CLI have `mcpServers`, VS Code has `servers`. They
differ in the names of a few keys, in how they write variables, and in what only a person at their window needs.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)
KEYS = ("command", "args", "env", "envFile", "cwd", "url", "httpUrl", "serverUrl", "headers", "auth_token", "type",
        "transport", "disabled", "enabled", "includeTools", "excludeTools", "disabledTools", "tools")  # fmt: skip
# What a person is shown or asks for. It changes nothing where no person is.
OF_A_WINDOW = {
    "autoApprove", "alwaysAllow", "trust", "description", "name", "icon", "gallery", "version", "dev", "watchPaths",
    "sandbox", "sandboxEnabled", "transportType", "instructions", "alwaysLoad", "providerOptions",
}  # fmt: skip
LOGIN = {"auth", "oauth", "oauth2", "headersHelper", "authProviderType", "targetAudience", "targetServiceAccount"}
TYPES = {"stdio": "stdio", "local": "stdio", "http": "http", "streamablehttp": "http", "sse": "sse", "remote": None}
SHAPES = {"command": str, "args": list, "env": dict, "envFile": str, "cwd": str, "url": str, "headers": dict,
          "auth_token": str}  # fmt: skip


def read_servers(path: str, key: str) -> dict[str, dict[str, Any]]:
    """The servers of a JSON file that are not disabled, by name.

    Each has `command` (with `args`, `env`, `cwd`) or `url` (with `headers`), whose variables are filled in; `type`
    (`stdio`, `http`, `sse` or None: what fits is tried); `only` and `without`, the names of tools that it is to offer,
    None for all, and those that it is not to.

    Args:
        path: The file. It may have comments and commas behind the last entry, as VS Code's may.
        key: The recipe's, for messages.

    Raises:
        ValueError: The file is of another form, or a variable is not set.
    """
    try:
        found = read_json_with_comments(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{key}: {path!r} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{key}: {path!r} is not JSON ({error}).") from None
    found = found if isinstance(found, dict) else {}
    inputs = found if "servers" in found else found.get("mcp")  # older settings of VS Code have it one level deeper
    servers = found.get("mcpServers") or (inputs.get("servers") if isinstance(inputs, dict) else None)
    if not isinstance(servers, dict) or not servers:
        raise ValueError(
            f'{key}: {path!r} has no "mcpServers", or "servers" as in VS Code. Expected {{"mcpServers": {{"name": '
            '{"command": ...} or {"url": ...}}}.'
        )
    entries = {name: one_form(entry, f"{key}: server {name!r} of {path!r}") for name, entry in servers.items()}
    return {name: entry for name, entry in entries.items() if entry is not None}


def read_json_with_comments(text: str) -> Any:
    """The value of JSON that may have comments and trailing commas. Raises `ValueError`, also for a repeated key.

    >>> read_json_with_comments('{"a": "//", /* one */ "b": [1,],} // two')
    {'a': '//', 'b': [1]}
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"the key {repeated[0]!r} is set twice. Remove one")
        return dict(pairs)

    quoted = r'("(?:\\.|[^"\\])*")'
    text = re.sub(quoted + r"|//[^\n]*|/\*.*?\*/", lambda found: found[1] or " ", text, flags=re.S)
    text = re.sub(quoted + r"|,(?=\s*[}\]])", lambda found: found[1] or "", text)
    return json.loads(text, object_pairs_hook=once)


def one_form(entry: Any, where: str) -> dict[str, Any] | None:
    """An entry as `read_servers` gives it; None for one that is disabled. Raises `ValueError`."""
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is {entry!r:.100}, expected an object with command or url.")
    for name in ("disabled", "enabled"):
        if entry.get(name) is not None and not isinstance(entry[name], bool):
            raise ValueError(f"{where}: {name} is {entry[name]!r:.100}, expected true or false.")
    if entry.get("disabled") or entry.get("enabled") is False:
        return None
    check_keys(entry, where)
    urls = [name for name in ("url", "httpUrl", "serverUrl") if name in entry]
    if ("command" in entry) + len(urls) != 1:
        raise ValueError(f"{where} has neither or both of command and url. Expected one of them.")
    made: dict[str, Any] = {**entry, **({"url": entry[urls[0]]} if urls else {})}
    for name, kind in SHAPES.items():
        if not isinstance(made.get(name) or kind(), kind):
            expected = {str: "text", list: "a list", dict: "an object"}[kind]
            raise ValueError(f"{where}: {name} is {made[name]!r:.100}, expected {expected}.")
    given = entry.get("type") or entry.get("transport") or ("http" if urls == ["httpUrl"] else "remote")
    form = re.sub("[-_]", "", str(given)).lower()
    if form not in TYPES:
        raise ValueError(f"{where} has the type {given!r:.100}, expected one of stdio, http, streamable-http, sse.")
    own = read_env_file(made["envFile"], where) if made.get("envFile") else {}
    own |= fill_all(made.get("env") or {}, where, "env", {})
    left_out = [*(entry.get("excludeTools") or []), *(entry.get("disabledTools") or [])]
    only = entry.get("tools") if entry.get("includeTools") is None else entry["includeTools"]  # [] offers none
    headers = fill_all(made.get("headers") or {}, where, "headers", {})
    if made.get("auth_token"):
        headers["Authorization"] = "Bearer " + fill(made["auth_token"], f"{where}: auth_token", {}, plain=True)
    made = {
        "type": "stdio" if "command" in entry else TYPES[form],
        "only": None if only is None or "*" in only else list(only),
        "without": left_out,
        **{name: fill(made[name], f"{where}: {name}", own) for name in ("command", "cwd", "url") if made.get(name)},
        "args": [fill(str(each), f"{where}: args", own) for each in made.get("args") or []],
        "env": own,
        "headers": headers,
    }
    filled = [made.get("command"), made.get("url"), *made["args"]]
    written = [entry.get("command"), entry[urls[0]] if urls else None, *map(str, entry.get("args") or [])]
    pairs = [pair for pair in zip(filled, written) if pair[0] and pair[0] != pair[1]]
    made["written"] = [pair for pair in pairs if not os.path.exists(pair[0])]  # a path is no key
    return made


def without_filled(text: str, entry: dict[str, Any]) -> str:
    """A text without what variables stand for in an entry, which may be keys: as its file has it.

    >>> without_filled("GET http://x/?key=s3cret: 500", {"written": [("http://x/?key=s3cret", "http://x/?key=${KEY}")]})
    'GET http://x/?key=${KEY}: 500'
    """
    for filled, written in sorted(entry.get("written", ()), key=lambda pair: -len(pair[0])):
        text = text.replace(filled, written) if len(filled) >= SHORTEST_KEY else text
    return text


SHORTEST_KEY = 6  # characters; a shorter text is no key, and stands in other words, too


def check_keys(entry: dict[str, Any], where: str) -> None:
    """Raise `ValueError` for a key that no client has, or that needs a person; say which one has no effect."""
    if asked := sorted(entry.keys() & LOGIN):
        raise ValueError(
            f"{where} has {asked[0]!r}, which needs an interactive login. Set headers instead, such as "
            '{"Authorization": "Bearer ${NAME_OF_A_VARIABLE}"}.'
        )
    if unknown := entry.keys() - {*KEYS, *OF_A_WINDOW, "timeout"}:
        raise ValueError(f"{where} has the keys {sorted(unknown)}, expected some of {', '.join(sorted(KEYS))}.")
    for name in ("includeTools", "excludeTools", "disabledTools", "tools"):
        if not isinstance(names := entry.get(name) or [], list) or not all(isinstance(each, str) for each in names):
            raise ValueError(f"{where}: {name} is {entry[name]!r:.100}, expected a list of names of tools.")
    if "timeout" in entry:  # some clients count in seconds, some in milliseconds
        logger.warning(
            f"{where}: timeout={entry['timeout']!r} has no effect. Set tool_timeout for calls, and mcp_start_timeout "
            "for the start."
        )


def fill_all(values: dict[str, Any], where: str, key: str, own: dict[str, str]) -> dict[str, str]:
    """The values of `env` or `headers` as texts, their variables filled in, `$NAME` too."""
    return {name: fill(str(value), f"{where}: {key}: {name}", own, plain=True) for name, value in values.items()}


def fill(text: str, where: str, own: dict[str, str], plain: bool = False) -> str:
    """A text with its variables: `${NAME}`, `${NAME:-default}`, `${env:NAME}`, `${file:path}` and those of VS Code.

    Args:
        text: What stands in the file.
        where: In words, for the error.
        own: Variables of the entry's own `env`, which count before those of this process.
        plain: Whether `$NAME` is one, too. In an argument it may be a shell's.

    Raises:
        ValueError: A variable is not set.

    >>> fill("${userHome}/${NO_SUCH_VARIABLE:-x}/$HOME", "args", {}).endswith("/x/$HOME")
    True
    """
    folder = os.getcwd()
    known: dict[str, Callable[[], str]] = {
        "userHome": lambda: os.path.expanduser("~"),
        "workspaceFolder": lambda: folder,
        "cwd": lambda: folder,
        "workspaceFolderBasename": lambda: os.path.basename(folder),
        "pathSeparator": lambda: os.sep,
        "/": lambda: os.sep,
    }

    def value(found: re.Match) -> str:
        name, _, default = (found[1] or found[2]).partition(":-")
        kind, colon, rest = name.partition(":")
        if kind == "file" and colon:
            try:
                return Path(os.path.expanduser(rest)).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"{where} names the file {rest!r}, which cannot be read: {error}.") from None
        if name in known:
            return known[name]()
        variable = rest if kind == "env" and colon else name
        if variable in {**os.environ, **own}:
            return {**os.environ, **own}[variable]
        if ":-" in (found[1] or ""):
            return default
        asks = " VS Code asks a person for it: write ${env:NAME} instead." if kind == "input" else ""
        raise ValueError(
            f"{where} has ${variable}, an environment variable that is not set. Set it, or write its value.{asks}"
        )

    return re.sub(r"\$\{([^}]*)\}" + (r"|\$([A-Za-z_]\w*)" if plain else "|(?!)()"), value, text)


def read_env_file(path: str, where: str) -> dict[str, str]:
    """The variables of an `envFile`: lines of `NAME=value`. Raises `ValueError` where it cannot be read."""
    try:
        lines = Path(fill(path, f"{where}: envFile", {})).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}: envFile {path!r} cannot be read: {error}.") from None
    lines = [line.strip().removeprefix("export ") for line in lines]
    pairs = (line.partition("=") for line in lines if line[:1] not in ("", "#"))
    return {name.strip(): text.strip().strip("\"'") for name, _, text in pairs}

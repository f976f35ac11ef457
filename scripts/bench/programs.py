"""Which programs were run on a scripted policy, with their versions: the table of docs/agents.md.

    python scripts/bench/programs.py                 # installs and runs all of them: half an hour; then the table
    python scripts/bench/programs.py --only codex    # only the tests whose names have this; the others keep their rows
    python scripts/bench/programs.py --report        # only write the table of docs/agents.md

Each test marked `program` that passes writes a row into docs/results/programs.json: the versions that it found
installed, the endpoints that were asked, the turns and the records of its rollouts, and the date. The table is made of
these rows. What a row cannot know, how a program is started and what its user has to know, stands here.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # imports begin in scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.common import ROOT, Frame

APIS = {"responses": "Responses", "chat/completions": "chat", "messages": "Anthropic's"}
Rows = dict[str, dict[str, Any]]  # by test


@dataclass(frozen=True)
class Tried:
    """A program of the table.

    Attributes:
        title: Its name.
        packages: Their versions are shown.
        tests: Names of the tests whose rows are shown.
        how: How it is started, and what its user has to know.
        records: What is to be said of its records beside their number.
    """

    title: str
    packages: tuple[str, ...]
    tests: tuple[str, ...]
    how: str
    records: str = ""


PROGRAMS = (
    Tried("Codex CLI", ("@openai/codex",), ("test_codex", "test_codex_in_a_sandbox"), "as above"),
    Tried("Pi", ("@mariozechner/pi-coding-agent",), ("test_pi", "test_pi_in_a_sandbox"), "as above"),
    Tried("AI SDK", ("ai", "@ai-sdk/openai", "@ai-sdk/anthropic"), ("test_the_ai_sdk",),
          "`baseURL` of `createOpenAI`, which asks Responses by default, and of `createAnthropic`"),
    Tried("Qwen Code", ("@qwen-code/qwen-code",), ("test_qwen_code",),
          "`qwen --auth-type openai -m policy -y QUESTION`, or `anthropic`"),
    Tried("curl", ("curl",), ("test_curl",), "as above"),
    Tried("mini-swe-agent", ("mini-swe-agent",), ("test_mini_swe_agent", "test_mini_swe_agent_in_a_sandbox"),
          "`mini -m openai/policy -t QUESTION -y --exit-immediately`, by litellm"),
    Tried("Qwen-Agent", ("qwen-agent",), ("test_qwen_agent",),
          "`model_server` of its model. With `use_raw_api` it sends results without ids, which are refused"),
    Tried("CrewAI", ("crewai",), ("test_crewai",), '`LLM(model="openai/policy", ...)`',
          "It sends a call back without the text beside it: behind such a turn a record begins"),
    Tried("DSPy", ("dspy",), ("test_dspy",), "`dspy.LM(..., cache=False)`, by litellm",
          "`ReAct` tells its steps again in other words, so no turn is observed. Give its turns rewards by "
          "themselves, or use a `credit_assignment` of outcomes"),
    Tried("LangChain", ("langchain",), ("test_langchain_summarises_its_history",), "`SummarizationMiddleware`",
          "One up to a summary of the history, one of the summary, one behind it"),
    Tried("openai (Python)", ("openai",),
          ("test_a_conversation_token_for_token", "test_what_was_answered_goes_on_however_it_is_told"), "`agent`"),
    Tried("anthropic (Python)", ("anthropic",), ("test_a_loop_of_two_calls_token_for_token",), "`agent`"),
    Tried("LangGraph", ("langgraph", "langchain-openai"), ("test_langgraph",), "`agent`"),
    Tried("openai-agents", ("openai-agents",), ("test_openai_agents",), "`agent`"),
    Tried("Pydantic AI", ("pydantic-ai-slim",), ("test_pydantic_ai",), "`agent`"),
    Tried("smolagents", ("smolagents",),
          ("test_smolagents_tells_its_code_again_as_a_call_and_begins_records",
           "test_smolagents_tool_calls_are_told_as_text_and_begin_records"), "`agent`",
          "It tells its code again as a call, which the policy never wrote"),
    Tried("verifiers", ("verifiers",), ("test_a_verifiers_taskset_by_its_command_line",), "`vf-eval`"),
)  # fmt: skip


def rows_of(program: Tried, rows: Rows) -> Rows:
    """The rows that its line is made of."""
    first = program.packages[0]  # a test may have run other programs, too
    return {test: row for test, row in rows.items() if name_of(test) in program.tests and first in row["versions"]}


def name_of(test: str) -> str:
    """A test's name without its file and its parameters.

    >>> name_of("test_agent_programs.py::test_the_ai_sdk[chat-whole]")
    'test_the_ai_sdk'
    """
    return test.rpartition("::")[2].partition("[")[0]


def records_of(rollouts: list[list[int]]) -> str:
    """How many records rollouts had, (turns, records) each.

    >>> records_of([[3, 1], [2, 1]]), records_of([[2, 2]]), records_of([[4, 3], [3, 1], [4, 3]])
    ('one', 'one per turn', '1 of 3 turns, 3 of 4')
    """
    if all(records == 1 for _, records in rollouts):
        return "one"
    if all(records == turns for turns, records in rollouts):
        return "one per turn"
    shown = [f"{records} of {turns}" for records, turns in sorted({(r, t) for t, r in rollouts})]
    return ", ".join([f"{shown[0]} turns", *shown[1:]])


def line_of(program: Tried, rows: Rows) -> str:
    """A program's line of the table. Raises `ValueError` where its rows lack, or tell of several versions."""
    found = rows_of(program, rows)
    if missing := [test for test in program.tests if test not in map(name_of, found)]:
        raise ValueError(f"no row of {missing[0]}: run scripts/bench/programs.py --only {missing[0]}")
    versions = [{row["versions"].get(name) for row in found.values()} - {None} for name in program.packages]
    for name, of_name in zip(program.packages, versions):
        if len(of_name) != 1:
            raise ValueError(
                f"{program.title}: the rows have {sorted(of_name) or 'no version'} of {name}, expected one version. "
                f"Run scripts/bench/programs.py --only '{' or '.join(program.tests)}'."
            )
    asked = {name for row in found.values() for name in row["asked"]}
    records = records_of([each for row in found.values() for each in row["rollouts"]])
    names = "" if program.packages == (program.title,) else f" ({', '.join(f'`{n}`' for n in program.packages)})"
    cells = (
        program.title + ("" if program.title.startswith(("openai (", "anthropic (")) else names),
        ", ".join(version for (version,) in versions),
        ", ".join(shown for name, shown in APIS.items() if name in asked),
        f"{records}. {program.records}" if program.records else records,
        program.how,
        ", ".join(f"`{test}`" for test in program.tests),
        max(row["date"] for row in found.values()),
    )
    return f"| {' | '.join(cells)} |"


def section(rows: Rows) -> str:
    """The table."""
    head = ["| program | version | asks | records | how | test | ran |", "|---|---|---|---|---|---|---|"]
    return "\n".join(head + [line_of(program, rows) for program in PROGRAMS])


FRAME = Frame("programs", section)
FRAME.page = ROOT / "docs/agents.md"


def main(argv: list[str] | None = None) -> None:
    words = {"default": "", "metavar": "WORDS", "help": "as pytest's: only tests whose names fit"}
    if (options := FRAME.parse(__doc__, argv, None, only=words)) is None:
        return
    path = os.pathsep.join(filter(None, (str(ROOT / "tests"), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "pytest", "-p", "tried_programs", "--tried", str(FRAME.results), "-m", "program",
               "-k", options.only, "tests/adapters"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path})
    FRAME.report()  # what has passed is kept
    if done.returncode:
        sys.exit("error: a test failed, or none was found: see above. Its row is the one of its last success.")


if __name__ == "__main__":
    main()

"""Which programs the tests ran: a plugin of pytest that writes a row for each test marked `program` that has passed.

    python -m pytest -p tried_programs --tried docs/results/programs.json -m program tests/adapters

`scripts/bench/programs.py` runs it so. A row has what was found, and nothing that is said by hand: the versions that
are installed, the endpoints that were asked, how many turns and records each rollout had, and the date.
"""

import datetime
import importlib.metadata
import json
import re
import subprocess
from pathlib import Path

import pytest
from real_programs import VERSIONS

from mt_grpo.adapters.agents.server import ENDPOINTS, AgentServer, split_path
from mt_grpo.adapters.agents.session import AgentSession


class Tried:
    """Notes what a test's programs ask, and writes the rows.

    Args:
        path: Of the rows, by test. Those of other tests stay.
    """

    def __init__(self, path):
        self.path, self.asked, self.rollouts = Path(path), set(), []

    def watch(self):
        """From now on, note requests that are answered, and rollouts that end."""
        serve, finish = AgentServer.serve, AgentSession.finish

        async def serving(server, method, path, *args, **kwargs):
            served = await serve(server, method, path, *args, **kwargs)
            name = split_path(path)[1]
            if method == "POST" and name in ENDPOINTS and served.status == 200:
                self.asked.add(name)
            return served

        async def finishing(session):
            await finish(session)
            if session.rollout.turns:
                self.rollouts.append([len(session.rollout.turns), len(session.rollout.records)])

        AgentServer.serve, AgentSession.finish = serving, finishing

    def pytest_runtest_setup(self):
        self.asked, self.rollouts = set(), []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        marker = item.get_closest_marker("program")
        if report.when == "call" and report.passed and marker is not None:
            self.write(f"{item.path.name}::{item.name}", row_of(item, marker, self.asked, self.rollouts))
        return report

    def write(self, test, row):
        """Put a test's row in place of the one that it had."""
        rows = json.loads(self.path.read_text()) if self.path.is_file() else {}
        rows[test] = row
        self.path.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")


def row_of(item, marker, asked, rollouts):
    """What a test has found."""
    names = marker.args or item.module.PACKAGES[item.callspec.params["word"]]
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {
        "versions": {name: version_of(item, name) for name in names}, "asked": sorted(asked), "rollouts": rollouts,
        "date": today,
    }  # fmt: skip


def version_of(item, name):
    """The version of a program that a test has run, where it is installed."""
    if name == "curl":
        said = subprocess.run([name, "--version"], capture_output=True, text=True, check=True).stdout
        return re.match(r"curl ([\d.]+)", said)[1]
    if name in VERSIONS:
        about = item.funcargs["packages"] / "node_modules" / name / "package.json"
        return json.loads(about.read_text())["version"]
    if "python" in item.funcargs:
        code = f"import importlib.metadata; print(importlib.metadata.version({name!r}))"
        python = item.funcargs["python"](name)
        return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    return importlib.metadata.version(name)


def pytest_addoption(parser):
    parser.addoption("--tried", required=True, help="the file of the rows")


def pytest_configure(config):
    tried = Tried(config.getoption("--tried"))
    tried.watch()
    config.pluginmanager.register(tried, "tried")

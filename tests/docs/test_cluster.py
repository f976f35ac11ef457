"""docs/cluster.md: the table of sizes by its formula, its ports, and what an API key guards."""

import dataclasses
import re

import pytest
from test_docs import PAGES, section

from mt_grpo_trainer import MTGRPOConfig

PAGE = PAGES["docs/cluster.md"]
WORDS = " ".join(PAGE.split())


def size_rows() -> str:
    rows = []
    for memory in (24, 40, 80, 141):
        split = [0.8 * memory * gpus / 16 for gpus in (4, 8, 16, 32)]
        servers = [0.92 * memory * gpus / 4 for gpus in (1, 2, 4, 8)]
        cells = [f"{value:.1f}" for value in (0.8 * memory / 16, *split, *servers)]
        rows.append(f"| {memory} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def test_the_table_of_sizes_is_what_the_formula_gives():
    assert size_rows() in PAGE
    for formula in ("0.8 M / 16", "0.8 M N / 16", "0.92 M T / 4"):
        assert formula in section(PAGE, "How large a model fits where")


def test_the_bytes_of_a_parameter_are_those_of_the_other_page():
    other = section(PAGES["docs/rented_gpus.md"], "Where the memory goes")
    assert "| (16 or 18) P / N |" in other and "| (16 or 20) P |" in other and "takes 92% of its GPU" in other
    assert "20 in place of 16 for DDP, 18 for the others" in WORDS


def test_the_ports_are_the_defaults():
    defaults = {field.name: field.default for field in dataclasses.fields(MTGRPOConfig)}
    rows = re.findall(r"^\| (\d+) \| `(\w+)`", section(PAGE, "Ports"), re.M)
    assert rows == [(str(defaults[key]), key) for key in ("vllm_server_port", "vllm_group_port")]


def test_a_key_guards_the_paths_that_the_page_names():
    guarded = pytest.importorskip("vllm.entrypoints.serve.middleware.authenticate").GUARDED_PREFIX
    text = "only paths that begin with " + ", ".join(f"`{prefix}`" for prefix in guarded[:-1]) + f" or `{guarded[-1]}`"
    assert text in WORDS

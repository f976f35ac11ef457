"""The sync benchmark: its numbers from hand-written pushes, its report, its plain files; no server."""

import pytest
from bench import sync as bench
from bench.common import markers

BEGIN, END = markers("sync")
MODEL = {"parameters": 250_000_000, "tensors": 3, "bytes": 1_000_000_000}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Results and page in a folder of their own."""
    monkeypatch.setattr(bench.FRAME, "results", tmp_path / "docs/results/sync.json")
    monkeypatch.setattr(bench.FRAME, "page", tmp_path / "docs/speed.md")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/speed.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    return tmp_path


def pushes(*totals, split=True):
    """Pushes with half a second of check; without `split` the write is counted as gathering."""
    return [
        {**({"gather": 0.25, "write": 0.5} if split else {"gather": 0.75}), "load": t - 1.25, "check": 0.5, "total": t,
         "peak": 1_500_000_000}
        for t in totals
    ]  # fmt: skip


def row(size="0.6B", dtype="float32", split=True, **changes):
    plain = [{"write": 0.5, "read": 0.25}, {"write": 0.7, "read": 0.25}, {"write": 0.4, "read": 0.25}]
    return bench.summary(size, dtype, {**MODEL, **changes}, pushes(5.0, 2.0, 3.5, split=split), plain, plain)


def results(*rows):
    return {"machine": {"cores": 2, "cpu": "Abacus"}, "sync_dir": "/dev/shm", "short": False, "rows": list(rows)}


def test_a_row_has_spreads_speeds_and_multiples():
    got = row()
    assert got["seconds"]["total"] == {"min": 2.0, "median": 3.5, "max": 5.0}
    assert list(got["seconds"]) == ["gather", "write", "load", "check", "total"]
    assert got["plain_gb_per_s"] == {"write": 2.0, "read": 4.0}  # 1 GB
    assert got["times_plain"] == 4.0  # a push without its check, 3 s, over 0.5 + 0.25
    assert got["peak_multiple"] == 1.5
    assert got["repetitions"] == 3

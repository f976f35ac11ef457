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


def test_a_trainer_that_counts_the_write_as_gathering():
    got = row(split=False)
    assert "write" not in got["seconds"]
    assert "| 0.75 | in gather | 2.2 | 0.50 | 3.5 (2.0 to 5.0) |" in bench.markdown(results(got))


def test_the_report_replaces_the_section(folder):
    rows = [row("0.9M", bytes=4_000_000), row(), row(dtype="bfloat16", bytes=5e8)]
    bench.FRAME.keep(results(*rows), short=False)
    bench.main(["--report"])
    text = (folder / "docs/speed.md").read_text()
    assert text.startswith(f"before\n{BEGIN}\n\n**Weight sync**") and text.endswith(f"{END}\nafter\n")
    assert (
        "| 0.6B | float32 | 1,000 | 0.25 | 0.50 | 2.2 | 0.50 | 3.5 (2.0 to 5.0) | 0.50 + 0.25 | 4.0 | + 1.5 |" in text
    )
    assert "here 2.0 GB/s written and 4.0 GB/s read" in text  # of the largest push
    assert "2 cores of Abacus" in text and "median of 3 " in text and "old" not in text

"""The sync benchmark: its numbers from hand-written pushes; no server."""

from bench import sync as bench

MODEL = {"parameters": 250_000_000, "tensors": 3, "bytes": 1_000_000_000}


def pushes(*totals):
    """Pushes with half a second of check."""
    return [
        {"gather": 0.25, "write": 0.5, "load": t - 1.25, "check": 0.5, "total": t, "peak": 1_500_000_000}
        for t in totals
    ]


def test_a_row_has_spreads_speeds_and_multiples():
    plain = [{"write": 0.5, "read": 0.25}, {"write": 0.7, "read": 0.25}, {"write": 0.4, "read": 0.25}]
    got = bench.summary("0.6B", "float32", MODEL, pushes(5.0, 2.0, 3.5), plain, plain)
    assert got["seconds"]["total"] == {"min": 2.0, "median": 3.5, "max": 5.0}
    assert list(got["seconds"]) == ["gather", "write", "load", "check", "total"]
    assert got["plain_gb_per_s"] == {"write": 2.0, "read": 4.0}  # 1 GB
    assert got["times_plain"] == 4.0  # a push without its check, 3 s, over 0.5 + 0.25
    assert got["peak_multiple"] == 1.5
    assert got["repetitions"] == 3

"""The agents' benchmark: its report by hand-written numbers. The run itself needs a server."""

from bench import agents as bench


def row(shape, wait, repetition, seconds, cpu, completions=500):
    return {
        "shape": shape, "wait": wait, "repetition": repetition, "conversations": 256, "completions": completions,
        "seconds": seconds, "client_cpu": cpu,
    }  # fmt: skip


ROWS = [
    row("own", 0.2, 0, 8.0, 1.0), row("agent", 0.2, 0, 16.0, 4.0), row("agent", 0.2, 1, 8.0, 3.5),
    row("own", 0.2, 1, 4.0, 1.0), row("own", 1.0, 0, 8.0, 1.0, 250), row("agent", 1.0, 0, 8.0, 2.0, 500),
]  # fmt: skip


def test_the_report():
    machine = {"cores": 2, "cpu": "a CPU"}
    lines = bench.section({"machine": machine, "runs": ROWS}).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[-2:]]
    assert cells[0] == [
        "0.2 s", "48.0 (32.0 to 64.0)", "24.0 (16.0 to 32.0)", "0.50 (0.50 to 0.50)", "2.0 (2.0 to 2.0) ms",
        "7.5 (7.0 to 8.0) ms", "5.5 (5.0 to 6.0) ms",
    ]  # fmt: skip
    assert cells[1][-3:] == ["4.0 (4.0 to 4.0) ms", "4.0 (4.0 to 4.0) ms", "0.0 (0.0 to 0.0) ms"]
    assert bench.headline(ROWS) == "an agent's completion costs 5.0 ms of CPU more"

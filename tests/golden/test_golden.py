"""Golden batches: short runs give the ids, masks, credit, losses and gradients that they gave when they were recorded.

`python tests/golden/record.py NAME` records one again; the commit message says which number changes, and why.
"""

import pytest
from replay import CASES, differences, read, run


@pytest.mark.parametrize("name", CASES)
def test_a_run_gives_what_it_gave(name):
    samples, golden = read(name)
    assert golden["log 0/grad_norm"][0] > 0  # a batch that teaches nothing would hide a wrong loss
    lines = differences(run(CASES[name], samples)[1], golden)
    assert not lines, "\n".join([f"{len(lines)} lists differ", *lines[:20]])

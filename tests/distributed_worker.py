"""Run by tests on one and on two ranks: what came of a batch, of each rank.

python tests/distributed_worker.py MODEL OUT golden|records|passes|splits|refill|images

With `golden` it runs the batch of golden_batch.py, whose values are written by hand; with `records` that of
records_batch.py, whose histories are edited; with `passes` the batches of random_batches.py, in TRL's layout
and ours; with `splits` some of these split in several ways; with `refill` that of refill_run.py, whose groups without
signal are replaced; with `images` that of vision_run.py.
"""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import golden_batch as golden
import random_batches
import records_batch
import refill_run
import vision_run


def main():
    # Two threads of a loaded machine add in an order of their own: then a resumed run is not the same to the last bit.
    torch.set_num_threads(1)
    model, out = sys.argv[1], Path(sys.argv[2])
    world, rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", 1), ("RANK", 0)))
    results = {
        "golden": lambda: {name: golden.run_case(model, out, name, world) for name in golden.CASES},
        "records": lambda: records_batch.run_on_ranks(model, out, world),
        "passes": lambda: random_batches.run_on_ranks(model, out),
        "splits": lambda: random_batches.run_splits(model, out),
        "refill": lambda: refill_run.run_on_ranks(model, out, world),
        "images": lambda: vision_run.run_on_ranks(out, world),
    }[sys.argv[3]]()
    torch.save(results, out / f"{world}-{rank}.pt")


if __name__ == "__main__":
    main()

"""Record golden batches again: `python tests/golden/record.py [NAME ...]`, without a name all of them.

What changes a number on purpose records it again, and its commit message says which number and why.
"""

import sys

from replay import CASES, DATA, run, write

if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        samples, _ = run(CASES[name], None)
        write(name, samples, run(CASES[name], samples)[1])
        print(f"{name}: {(DATA / f'{name}.json').stat().st_size} bytes", flush=True)

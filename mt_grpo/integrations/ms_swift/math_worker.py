"""A process that compares answers by math-verify: `python math_worker.py SECONDS`.

It reads a JSON list (solution, answer or None, text) per line, and writes 1 or 0. A power such as 9^9^9 would compute
for ever, with Python's lock held, where no signal ends it: so the system ends the process after its CPU seconds.
"""

import json
import logging
import resource
import sys
import time

from math_verify import LatexExtractionConfig, parse, verify


def is_right(solution: str, answer: str | None, text: str) -> bool:
    """Whether the answer, otherwise LaTeX in the text, equals the solution. False if the solution cannot be read."""
    of_text = {"extraction_mode": "first_match", "parsing_timeout": None}
    gold = parse(solution, **of_text)
    if answer is None:
        latex = LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)
        found = parse(text, extraction_config=[latex], **of_text)
    else:
        found = parse(answer, **of_text)
    return bool(gold) and verify(gold, found, timeout_seconds=None)


if __name__ == "__main__":
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time limit of its own
    for line in sys.stdin:
        end = int(time.process_time() + float(sys.argv[1])) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (end, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        print(int(is_right(*json.loads(line))), flush=True)

"""Write the questions: `python hf_recipes/SmolLM2/parcel/data.py runs/parcel`. Items of the test are never trained."""

import json
import random
import sys
from pathlib import Path

from tools import WEIGHTS, ZONES, postage

folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
items = random.Random(0).sample(sorted(WEIGHTS), len(WEIGHTS))
for split, part in (("train", items[12:]), ("test", items[:12])):
    rows = [
        {
            "question": f"What does it cost to send a {item} to {country}?",
            "weight": str(WEIGHTS[item]),
            "answer": postage(WEIGHTS[item], country),
        }
        for item in part
        for country in ZONES
    ]
    random.Random(1).shuffle(rows)
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{split}: {len(rows)} questions")

"""Run a case of cases.yaml with recorded samples, and compare what comes of it with what was recorded.

A golden is a text file in JSON: what the model sampled, and a flat dict from names such as `0/rollout 3/turn_ids` to
numbers. What was sampled is given back by a scripted backend, so that a golden does not depend on the machine.
"""

import contextlib
import itertools
import json
import os
import shutil
import sys
import tempfile
import zlib
from collections import Counter
from pathlib import Path

import torch
import trl
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import mt_grpo_trainer as mt  # noqa: E402
from mt_grpo.rollout import Generation  # noqa: E402

DATA = Path(__file__).parent / "data"
RELATIVE, ABSOLUTE = 1e-5, 1e-7
METRICS = tuple(  # beginnings of names; one that is 0 or None is left out
    "loss grad_norm learning_rate reward eval_loss eval_reward entropy kl num_tokens clip_ratio/region_mean "
    "completions/mean_length turns/mean records/mean frac_reward_zero_std credit/ stop/ refill/ sampling/frac "
    "sampling/importance sampling/token".split()
)
IMAGE = 2**32  # ids of images begin here (mt_grpo/images/pictures.py)


# --- cases -----------------------------------------------------------------------------------------------------------


def read_cases() -> dict[str, dict]:
    """The cases by name, each with its `settings` of `base`, of its parts and of its own."""
    table = yaml.safe_load((Path(__file__).parent / "cases.yaml").read_text())
    cases = {}
    for name, own in table["cases"].items():
        settings = dict(table["base"])
        for part in own.pop("with", []):
            settings |= table["parts"][part]
        case = {key: own.pop(key, None) for key in ("recipe", "served", "texts", "moves", "template")}
        if case["moves"]:
            case["texts"] = [[f"<action>{move}</action>" for move in moves.split()] for moves in case["moves"]]
        cases[name] = case | {"recipe": f"hf_recipes/tiny/{case['recipe']}.yaml", "settings": settings | own}
    return cases


CASES = read_cases()


# --- lists of numbers as text ----------------------------------------------------------------------------------------


def pack(numbers: list) -> str:
    """Numbers as text; what repeats is written once.

    >>> pack([7, 7, 7, 12, 0.5]), unpack(pack([7, 7, 7, 12, 0.5]))
    ('7*3 12 0.5', [7.0, 7.0, 7.0, 12.0, 0.5])
    """
    texts = ["-" if number is None else f"{number:.8g}" for number in numbers]
    runs = [(text, len(list(same))) for text, same in itertools.groupby(texts)]
    return " ".join(f"{text}*{count}" if count > 1 else text for text, count in runs)


def unpack(text: str) -> list:
    """What `pack` was given, as floats; None where it was None."""
    runs = (run.partition("*")[::2] for run in text.split())
    return [n for value, count in runs for n in [None if value == "-" else float(value)] * int(count or 1)]


def plain(ids: list[int]) -> list[int]:
    """Ids, with those of the n-th image as -n: their digests may be made otherwise."""
    images = list(dict.fromkeys(i for i in ids if i >= IMAGE))
    return [-1 - images.index(i) if i >= IMAGE else int(i) for i in ids]


# --- the backend -----------------------------------------------------------------------------------------------------


class Recorder:
    """Keeps what a trainer's own backend samples, or the `texts` of a case as if it had been sampled."""

    def __init__(self, trainer, case: dict):
        self.trainer, self.inner, self.texts, self.logprobs = trainer, trainer.llm, case["texts"], case["served"]
        self.samples: dict[str, list] = {}
        self.turns: Counter[int] = Counter()  # of each rollout, those written by hand

    def __getattr__(self, name):
        if self.__dict__["texts"]:  # then nothing is generated in batches
            raise AttributeError(name)
        return getattr(self.inner, name)

    async def generate(self, prompt_ids, max_tokens, sampling_params=None, index=0):
        if self.texts:
            texts, tokenizer = self.texts[index % len(self.texts)], self.trainer.processing_class
            text = texts[min(self.turns[index], len(texts) - 1)] + tokenizer.eos_token
            given = Generation(tokenizer(text, add_special_tokens=False)["input_ids"], None, "stop")
            self.turns[index] += 1
        else:
            given = await self.inner.generate(prompt_ids, max_tokens, sampling_params, index)
        sample = [pack(given.token_ids), given.finish_reason]
        if self.logprobs:
            sample.append(pack(self.logprobs_of(prompt_ids, given.token_ids)))
        self.samples.setdefault(name_of(index, prompt_ids), []).append(sample)
        return given

    def logprobs_of(self, prompt_ids, ids) -> list[float]:
        """The policy's logprobs, but for what an engine of another kind might compute: up to 0.1 more or less."""
        with torch.no_grad():
            logits = self.trainer.model(torch.tensor([prompt_ids + ids])).logits[0, len(prompt_ids) - 1 : -1]
        logprobs = logits.float().log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        return [round(value + 0.1 * ((7 * k) % 11 - 5) / 5, 4) for k, value in enumerate(logprobs.tolist())]


class Replay:
    """Gives what was sampled for the same prompt of the same rollout, in the same order."""

    def __init__(self, samples: dict[str, list], tokenizer):
        self.samples, self.tokenizer = {name: list(given) for name, given in samples.items()}, tokenizer

    async def generate(self, prompt_ids, max_tokens, sampling_params=None, index=0):
        if not self.samples.get(name_of(index, prompt_ids)):
            known = [name for name, left in self.samples.items() if left and name.startswith(f"{index} ")]
            end = self.tokenizer.decode([i for i in prompt_ids if i < IMAGE])[-300:]
            raise AssertionError(
                f"Rollout {index} reads {len(prompt_ids)} tokens that it did not read when the golden was recorded "
                f"(left of it, as rollout, tokens and digest: {known}). They end with {end!r}."
            )
        ids, reason, *logprobs = self.samples[name_of(index, prompt_ids)].pop(0)
        ids = [int(i) for i in unpack(ids)]
        assert len(ids) <= max_tokens, f"Rollout {index}: {len(ids)} tokens were sampled, {max_tokens} are allowed."
        return Generation(ids, unpack(logprobs[0]) if logprobs else None, reason)


def name_of(index: int, prompt_ids: list[int]) -> str:
    """The rollout and what it reads."""
    return f"{index} {len(prompt_ids)} {zlib.crc32(pack(plain(prompt_ids)).encode()):08x}"


# --- a run -----------------------------------------------------------------------------------------------------------


def run(case: dict, samples: dict[str, list] | None) -> tuple[dict[str, list], dict[str, list]]:
    """(samples, what came of the run). Without `samples` the model samples, and nobody asks for its logprobs.

    Only TRL's methods, `Rollout`, the rollout log and `log_history` are looked at: what is behind them may change.
    """
    with tempfile.TemporaryDirectory() as out, surroundings():
        if case["template"]:
            case = with_template(case, Path(out, "model"))
        trainer = mt.build_trainer(*mt.parse_arguments(arguments(case, out)))
        for name, weights in trainer.model.named_parameters():
            if "lora_" in name:  # drawn by its name: what was drawn before must not matter, and B must not be 0
                generator = torch.Generator().manual_seed(zlib.crc32(name.split("lora_")[1].encode()))
                weights.data.copy_(0.05 * torch.randn(weights.shape, generator=generator))
        if samples is None:
            trainer.llm = backend = Recorder(trainer, case)
        else:
            trainer.llm = backend = Replay(samples, trainer.processing_class)
            for name, value in (case["served"] or {}).items():
                setattr(trainer.args, name, value)
                setattr(trainer, name, value)
        found = watch(trainer)
        trainer.train()
        for number, row in enumerate(trainer.state.log_history):
            for name in sorted(row):
                if name.startswith(METRICS) and not name.endswith(("/std", "seconds")) and row[name]:
                    found[f"log {number}/{name}"] = [row[name]]
        for number, line in enumerate(Path(out, "rollouts.rank0.jsonl").read_text().splitlines()):
            row = json.loads(line)
            for name in ("turn_rewards", "turn_advantages"):
                found[f"logged rollout {number}/{name}"] = row[name]
    return backend.samples, found


def watch(trainer) -> dict[str, list]:
    """A dict that is filled with the rows and the credit of each step."""
    found: dict[str, list] = {}
    generate, numbers = trainer._generate_and_score_completions, itertools.count()

    def generate_and_note(inputs):
        output, number = generate(inputs), next(numbers)
        for i, rollout in enumerate(trainer.batch.rollouts):
            note = f"{number}/rollout {i}"
            for part in ("prompt", "completion"):
                real = output[f"{part}_mask"][i].bool()
                found[f"{note}/{part}_ids"] = plain(output[f"{part}_ids"][i][real].tolist())
            for name, key in (("loss_mask", "tool_mask"), ("advantages", "advantages")):
                found[f"{note}/{name}"] = output[key][i][real].tolist()
            for k, record in enumerate(rollout.records):
                found[f"{note}/record {k}/turn_ids"] = record.turn_ids
                if k:
                    found[f"{note}/record {k}/prompt_ids"] = plain(record.prompt_ids)
                    found[f"{note}/record {k}/completion_ids"] = plain(record.completion_ids)
                    found[f"{note}/record {k}/loss_mask"] = record.loss_mask
        torch.manual_seed(number)  # TRL shuffles what comes out by the generator that sampling has used
        return output

    trainer._generate_and_score_completions = generate_and_note
    return found


def with_template(case: dict, path: Path) -> dict:
    """The case with a copy of its recipe's model that has one of TRL's chat templates."""
    shutil.copytree(ROOT / yaml.safe_load((ROOT / case["recipe"]).read_text())["model_name_or_path"], path)
    shutil.copy(Path(trl.__file__).parent / "chat_templates" / case["template"], path / "chat_template.jinja")
    return case | {"settings": case["settings"] | {"model_name_or_path": str(path)}}


def arguments(case: dict, out: str) -> list[str]:
    """The command line of a case."""
    given = ["--config", case["recipe"], "--output_dir", out]
    for name, value in case["settings"].items():
        given += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return given


@contextlib.contextmanager
def surroundings():
    """One thread, the project as the working directory, this Python in front; as before behind it."""
    threads, environment, folder = torch.get_num_threads(), dict(os.environ), os.getcwd()
    torch.set_num_threads(1)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    os.chdir(ROOT)
    try:
        yield
    finally:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads(threads)


# --- files and comparison --------------------------------------------------------------------------------------------


def write(name: str, samples: dict[str, list], found: dict[str, list]) -> None:
    """Write a golden. A list that stands above is named and not written again."""
    seen, lines = {}, {}
    for path, numbers in found.items():
        text = pack(numbers)
        lines[path] = f"@{seen[text]}" if text in seen else text
        if len(text) > 40:
            seen.setdefault(text, path)
    body = {"samples": dict(sorted(samples.items())), "found": lines}
    parts = [
        f'"{part}":{{\n'
        + ",\n".join(json.dumps(k) + ":" + json.dumps(v, separators=(",", ":")) for k, v in rows.items())
        for part, rows in body.items()
    ]
    DATA.mkdir(exist_ok=True)
    (DATA / f"{name}.json").write_text("{" + "},\n".join(parts) + "}}\n")


def read(name: str) -> tuple[dict[str, list], dict[str, list]]:
    """The samples of a golden, and what came of its run."""
    golden = json.loads((DATA / f"{name}.json").read_text())
    lines = golden["found"]
    return golden["samples"], {k: unpack(lines[v[1:]] if v.startswith("@") else v) for k, v in lines.items()}


def differences(found: dict[str, list], golden: dict[str, list]) -> list[str]:
    """A line for each list that is not as it was: where, and the first index."""
    lines = []
    for path in sorted(found.keys() | golden.keys()):
        absent = [0.0] if path.startswith("log ") else []  # a metric that is 0 is left out
        new, old = unpack(pack(found.get(path, absent))), golden.get(path, absent)
        wrong = [k for k, pair in enumerate(zip(new, old)) if not close(*pair)]
        if len(new) != len(old):
            wrong.append(min(len(new), len(old)))
        if wrong:
            k = wrong[0]
            parts = f"{new[k : k + 5]}, were {old[k : k + 5]}"
            lines.append(f"{path}: {len(new)} numbers, were {len(old)}; from index {k} on {parts}")
    return lines


def close(new: float | None, old: float | None) -> bool:
    """Whether two numbers are the same. Ids and masks have to be equal: they are far smaller than 1 / RELATIVE."""
    if new is None or old is None or new != new or old != old:
        return repr(new) == repr(old)
    return abs(new - old) <= RELATIVE * abs(old) + ABSOLUTE

"""Commands of the README and of pages that are run; a training takes one small step instead of minutes.

The tour's: tests/docs/test_tour.py. Which options the programs of all pages have: tests/docs/test_docs.py.
"""

import doctest
import re
import shutil
import subprocess
import tomllib

import pytest
import quickstart
from test_docs import PAGES, ROOT, block, blocks, words_of
from test_tour import PROGRAMS, run

CONCEPTS_AND_HOW_TO = (
    "own_task choosing_credit recipes rollouts agents tools games images scaling resuming troubleshooting forking"
).split()
# Commands of these pages that other tests run, or that need GPUs, Docker or an address.
ELSEWHERE = (
    "bash scripts/quickstart.sh mytool", "python mt_grpo_trainer.py --config hf_recipes/SmolLM2/parcel",
    "python scripts/explain_credit.py --config hf_recipes/SmolLM2/parcel", "python scripts/view_rollouts.py",
    "python scripts/serve_search.py", "python tools/openenv/frozen_lake.py", "bash scripts/quickstart.sh zoom",
    "VLLM_SERVERS=2 bash scripts/train.sh", "bash scripts/train.sh hf_recipes/tiny/calculator-sglang.yaml",
    "TRAINER=my_idea.py bash scripts/train.sh", "python my_idea.py", "bash scripts/serve.sh",
    "TRAINER=my_idea.py python scripts/explain_credit.py", "accelerate launch", "RECIPE=",
    "python scripts/build/wiki_corpus.py", "VLLM_SERVER_DEV_MODE=1", "CUDA_VISIBLE_DEVICES",
    "bash scripts/setup.sh --gpu", "NUM_SERVERS=4 ", "nvidia-smi", "tail ", "kill ", "echo ", "ssh ", "mkdir ",
    "git clone", "cd ", "source ", "bash scripts/setup.sh --sglang", "python3.12 ", "export ", "docker ",
)  # fmt: skip
SMALL = "--max_steps 1 --per_device_train_batch_size 8"
FEWER = {"--log_rollouts 64": f"--log_rollouts 8 {SMALL}", "runs/again": f"runs/again {SMALL}", "512": "8",
         "exact_match_reward_func=1": "exact_match_reward_func=0", "any words": "Normans"}  # fmt: skip


@pytest.mark.contract("quickstart")
def test_the_quickstart_runs(tmp_path, monkeypatch, capsys):
    """What quickstart.sh starts behind the installation, with fewer problems and one step."""
    assert 'exec .venv/bin/python scripts/quickstart.py "$@"' in (ROOT / "scripts/quickstart.sh").read_text()
    assert block(PAGES["README.md"], "bash", "quickstart.sh") == "bash scripts/quickstart.sh\n"
    for path in ROOT.iterdir():  # a folder that looks like the clone, in which the run may write
        if path.name not in ("runs", ".git", "data"):
            (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quickstart, "NUM_PROBLEMS", 16)
    quickstart.main(["--max_steps", "1", "--per_device_train_batch_size", "8", "--disable_tqdm", "true"])
    said = capsys.readouterr().out
    shown = block(PAGES["README.md"], "", "1/3 evaluating")
    for line in shown.splitlines():
        if line.strip(" .") and not re.match(r" +\d+/60 ", line):
            begin = re.split(r"[\d.]+;?(?:$|\s)", line.replace("512", "16").replace("for 60", "for 1"))[0].rstrip()
            assert begin.strip() in said, line
    assert (tmp_path / "runs/chain-sparse/model.safetensors").is_file()


def test_the_method_page_computes_what_it_shows():
    """Its blocks go on from each other."""
    body = "\n".join(blocks(PAGES["docs/method.md"], "python"))
    test = doctest.DocTestParser().get_doctest(body, {}, "docs/method.md", None, 0)
    result = doctest.DocTestRunner().run(test)
    assert result.failed == 0 and result.attempted > 10


def test_extras_that_pages_install_exist():
    """`pip install -e '.[name]'` of all pages."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"pip install -e '?\.\[(\w+)\]", "".join(PAGES.values()))
    assert named and set(named) <= set(extras)


def lines_of(page: str) -> list[str]:
    """The commands of a page's bash blocks, a line each."""
    text = "".join(blocks(PAGES[f"docs/{page}.md"], "bash"))
    return text.replace("\\\n", " ").splitlines()


@pytest.mark.slow
def test_the_commands_of_the_pages_run(tmp_path, monkeypatch):
    """Those that are not in `ELSEWHERE`, with fewer rollouts, in a folder that looks like the clone."""
    for path in ROOT.iterdir():
        if path.name not in ("runs", ".git", "data", "my_idea.py"):
            (tmp_path / path.name).symlink_to(path)
    shutil.copy(ROOT / "hf_recipes/tiny/towns/corpus.jsonl", tmp_path / "corpus.jsonl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(PROGRAMS, "scripts/export_sft.py", "export_sft")
    ran = []
    for line in [line for page in CONCEPTS_AND_HOW_TO for line in lines_of(page)]:
        if line.strip() and not line.startswith(ELSEWHERE):
            for old, new in FEWER.items():
                line = line.replace(old, new)
            words = words_of(line)
            if words[0] == "python" and words[1] in PROGRAMS:  # in this process, which has torch already
                assert run(words, monkeypatch)[0] == 0, line
            else:
                subprocess.run(["bash", "-c", line], check=True)
            ran.append(line)
    assert len(ran) == 11 and (tmp_path / "data.jsonl").is_file()

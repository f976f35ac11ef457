"""The proof of the first push: each tensor that a server leaves out shows, and the trainer's weights come back."""

import copy
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from bench.common import ROOT
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from mt_grpo.base.errors import ServerError
from mt_grpo.generation.samples import continues
from mt_grpo.generation.weight_sync import WeightSync
from mt_grpo.generation.weights import PolicyWeights, adapter_weights, is_of_adapter, why_model_merges

TINY = ROOT / "hf_recipes/tiny/calculator-model"
TEXT = (
    "<|im_start|>system\nUse the calculator, then answer.<|im_end|>\n<|im_start|>user\nWhat is 23 * 41 - 7?<|im_end|>"
)
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")


class Receiver:
    """A server that computes with a copy of the model in its own dtype, and leaves one tensor of a push out."""

    def __init__(self, model, dtype):
        self.model, self.held, self.left_out = copy.deepcopy(model).to(dtype), "default", None
        if not hasattr(model, "peft_config"):  # as vLLM on a CPU, it keeps the two names of a tied weight apart
            self.model.lm_head.weight = torch.nn.Parameter(self.model.lm_head.weight.detach().clone())
        self.own = copy.deepcopy(self.model.state_dict())
        self.servers, self.max_model_len = [SimpleNamespace(base_url="http://receiver")], 1024

    def start_anew(self, left_out):
        self.model.load_state_dict(self.own)
        self.left_out = left_out

    @property
    def settings(self):
        return {"dtype": str(self.model.dtype)}

    def weight_version(self):
        return self.held

    @torch.no_grad()
    def update_weights(self, named_weights, version, expected, device):
        for name, tensor in named_weights:
            own = name.replace(".weight", ".default.weight") if "lora" in name else name
            if name != self.left_out:
                self.model.get_parameter(own).copy_(tensor)
        self.held = version
        return {}

    @torch.no_grad()
    def logprobs(self, ids):
        logprobs = self.model(input_ids=torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
        return logprobs.gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist()

    def scores(self, ids):
        return {0: [self.logprobs(ids)]}

    def ask(self, question):
        return {0: question(self)}

    def sample_behind(self, ids, number):
        found = list(ids)
        with torch.no_grad():
            for _ in range(number):
                found.append(self.model(input_ids=torch.tensor([found])).logits[0, -1].argmax().item())
        return found[-number:], self.logprobs(found)[-number:]


def proof(dtype=torch.float32, lora=False, model=None):
    """(the model, a receiver of its pushes, the WeightSync between them)."""
    base = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    receiver = Receiver(get_peft_model(copy.deepcopy(base), LORA) if lora else base, dtype)
    model = model or (get_peft_model(base, LORA) if lora else base)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    weights = PolicyWeights(model, Accelerator(cpu=True), tokenizer, mode="none")
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        is_main_process=True,
        unwrap_model=lambda model: model,
        autocast=lambda: torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16),
    )
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    sync = WeightSync(receiver, model, weights, accelerator, ids)
    sync.adapter = LORA if lora else None
    return model, receiver, sync


def passing(receiver, sync, names):
    """The tensors without which a push passes; None is a push of all."""
    passed = []
    for left_out in (None, *names):
        receiver.start_anew(left_out)
        try:
            sync._check_that_pushes_arrive("run-0")
            passed.append(left_out)
        except ServerError as error:
            assert "A changed weight did not arrive at http://receiver" in str(error)
    return passed


@pytest.mark.contract("proof of weights")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_each_tensor_that_is_left_out_shows(dtype):
    """46 tensors, of which one is tied and has two names. In bfloat16 right weights are 0.04 away."""
    model, receiver, sync = proof(dtype)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    names = sync.weights.expected
    assert len(before) == 46 and len(names) == 47
    assert passing(receiver, sync, sorted(names)) == [None]
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.contract("proof of weights")
def test_each_tensor_of_an_adapter_that_is_left_out_shows():
    """Also a lora_B, which begins as zero, and alone its lora_A. The model's own weights stay as they are."""
    model, receiver, sync = proof(lora=True)
    names = [name for name, _ in adapter_weights(model)]
    assert len(names) == 16 and not any(p.any() for name, p in model.named_parameters() if "lora_B" in name)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with sync.weights.noise(adapter=True):
        changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if is_of_adapter(name)}
    assert passing(receiver, sync, names) == [None]
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_the_proof_finds_an_adapter_of_one_side_of_tied_weights():
    """The trainer's embedding is adapted and its head is not; both get the merged tensor, which one of them lacks."""
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    model, receiver, sync = proof(model=get_peft_model(model, LoraConfig(r=4, target_modules=["embed_tokens"])))
    assert "lora_embedding_A.default is trained in addition to it" in why_model_merges(model, sharded=False)
    with pytest.raises(ServerError, match="A changed weight did not arrive"):
        sync._check_that_pushes_arrive("run-0")


def test_noise_changes_every_tensor_and_comes_off_bit_for_bit():
    """Twice the same noise, whatever was drawn in between; also of zeros, of -0.0, and where an error ends it."""
    model, _, sync = proof()
    with torch.no_grad():
        model.model.norm.weight[:3] = torch.tensor([-0.0, 1e-40, float("inf")])
        model.model.layers[0].self_attn.q_norm.weight.zero_()
    before = {name: p.detach().clone().view(torch.int32) for name, p in model.named_parameters()}
    noisy, state = [], torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(KeyError), sync.weights.noise(adapter=False):
            noisy.append({name: p.detach().clone() for name, p in model.named_parameters()})
            raise KeyError
        assert all(torch.equal(p.view(torch.int32), before[name]) for name, p in model.named_parameters())
    assert torch.equal(torch.get_rng_state(), state)  # a run samples what it sampled without the proof
    for name, tensor in noisy[0].items():
        assert torch.equal(tensor, noisy[1][name]) and not torch.equal(tensor.view(torch.int32), before[name]), name
    layer, other = (noisy[0][f"model.layers.{n}.input_layernorm.weight"] for n in (0, 1))
    own = [model.get_parameter(f"model.layers.{n}.input_layernorm.weight") for n in (0, 1)]
    factors = layer / own[0], other / own[1]
    assert all(0.5 < (factor - 1).std() < 0.9 for factor in factors) and not torch.allclose(*factors)


def test_a_run_that_is_killed_in_between_leaves_a_version_that_nobody_accepts():
    """Neither that run's own ranks, nor it resumed, nor another run: the servers hold weights with noise."""
    _, receiver, sync = proof()
    push = sync._push

    def killed(version):
        push(version)
        raise KeyboardInterrupt

    sync._push = killed
    with pytest.raises(KeyboardInterrupt):
        sync._check_that_pushes_arrive("3f2a-7")
    assert receiver.held == "3f2a-7-probe"
    for held in (receiver.held, f"loading-{receiver.held}"):
        for version in ("3f2a-7", "3f2a-6", "77c1-7"):
            assert continues(held, version, 0) is False

"""Rows in which a prompt stands once: the records of its group behind it, without padding.

Records are laid out as a tree: what several of them begin with stands once, such as the prompt of a group or a system
prompt, and their own tokens follow. In the attention a token reads what comes before it in its own record. So linear
layers see nothing twice, and each token has the hidden state that it has in a row of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftModel
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mt_grpo.images.pictures import is_picture, picture_of, pictures_in, runs_of, with_placeholders

logger = logging.getLogger(__name__)

NAME = "shared_prompts"  # of the attention function, as transformers knows it
FEWEST_SHARED = 16  # tokens for which a record is cut in two: each part costs a call of the attention
BLOCK = 512  # queries of a longer segment that are computed together: each block reads no key behind its end
KEYWORD = "shared_row"  # the argument of a model's forward that says how a row is laid out


@dataclass
class Example:
    """A record, of which some tokens are trained."""

    prompt_ids: list[int]  # at least one
    completion_ids: list[int]
    trained: Sequence[int | bool]  # of each of the completion's tokens: whether its logprob is wanted


@dataclass(eq=False)
class Node:
    """Tokens of the tree that all records below it have, at least one except for the root."""

    ids: list[int]
    children: list[Node] = field(default_factory=list)
    number: int = 0  # of its segment in the row, once it is laid out

    def add(self, ids: list[int]) -> Node:
        """Put a record below the root, and return its last node. It may end before that node does."""
        node, at = self, 0
        while at < len(ids):
            child, shared = max(
                ((child, common_length(child.ids, ids, at)) for child in node.children),
                key=lambda found: found[1],
                default=(None, 0),
            )
            if shared == len(ids) - at and shared:
                return child
            if child is None or shared < min(FEWEST_SHARED, len(child.ids)):
                node.children.append(Node(ids[at:]))
                return node.children[-1]
            if shared < len(child.ids):  # its first tokens get a node of their own. It stays the last node of others
                upper = Node(child.ids[:shared], [child])
                node.children[node.children.index(child)] = upper
                child.ids, child = child.ids[shared:], upper
            node, at = child, at + shared
        return node


def common_length(one: list[int], other: list[int], start: int) -> int:
    """How many tokens of `one`, and of `other` from `start` on, are the same from the beginning."""
    limit = min(len(one), len(other) - start)
    if one[:limit] == other[start : start + limit]:
        return limit
    return next(k for k in range(limit) if one[k] != other[start + k])


class SharedRow:
    """Examples, by their numbers among the B rows of a batch, as one row of L tokens of which S logprobs are wanted.

    `shape` is (B, C), of the batch's completions. `position_ids` are (1, L), or (3, 1, L) with images (`shown`).
    `scored`, (S,), is where the token before a wanted one stands; `labels`, (1, S), are the wanted tokens. The row is
    cut into segments of these `sizes`, each of which `reads` segments, itself the last, of `num_keys` tokens.

    >>> examples = {0: Example([1, 2, 3], [4, 5], [1, 1]), 1: Example([1, 2, 3], [6, 7, 8], [0, 1, 0])}
    >>> row = SharedRow(examples, (2, 3))
    >>> row.input_ids, row.position_ids  # after a record's last wanted token nothing is computed
    (tensor([[1, 2, 3, 4, 6]]), tensor([[0, 1, 2, 3, 3]]))
    >>> row.scored, row.labels, row.reads
    (tensor([2, 3, 4]), tensor([[4, 5, 7]]), [(0,), (0, 1), (0, 2)])
    >>> row.spread(torch.tensor([[-1.0, -2.0, -3.0]]))
    tensor([[-1., -2.,  0.],
            [ 0., -3.,  0.]])
    """

    def __init__(self, examples: dict[int, Example], shape: tuple[int, int], device: torch.device | str = "cpu"):
        self.shape, self.device = shape, torch.device(device)
        parts = [ids for each in examples.values() for ids in (each.prompt_ids, each.completion_ids)]
        flat = not is_picture(max((max(ids, default=0) for ids in parts), default=0))
        self._masks: dict[tuple, torch.Tensor] = {}
        root, ends = Node([]), {}
        for number, example in examples.items():
            if wanted := [k for k, flag in enumerate(example.trained) if flag]:
                # The prompt first, so that it is whole for the group whatever its completions begin with.
                root.add(example.prompt_ids)
                ends[number] = root.add(example.prompt_ids + example.completion_ids[: wanted[-1]]), wanted
        if not ends:  # a model's forward pass needs one token, and the head one position
            root.add(next(iter(examples.values())).prompt_ids[-1:])
        self.sizes: list[int] = []
        self.reads: list[tuple[int, ...]] = []
        starts, ids, positions = [], [], []
        waiting = [(node, (), 0) for node in reversed(root.children)]
        while waiting:
            node, context, first = waiting.pop()
            node.number = len(self.sizes)
            starts.append(len(ids))
            self.sizes.append(len(node.ids))
            self.reads.append((*context, node.number))
            own, after = positions_of(node.ids, first, flat)
            ids += node.ids
            positions += own
            waiting += [(child, self.reads[-1], after) for child in reversed(node.children)]
        self.num_keys = [sum(self.sizes[k] for k in reads) for reads in self.reads]
        scored, labels, cells = [], [], []
        for number, (end, wanted) in ends.items():
            example = examples[number]
            places = [starts[n] + k for n in self.reads[end.number] for k in range(self.sizes[n])]
            scored += [places[len(example.prompt_ids) + k - 1] for k in wanted]
            labels += [example.completion_ids[k] for k in wanted]
            cells += [number * shape[1] + k for k in wanted]
        if not ends:
            scored, labels, cells = [0], [-100], [shape[0] * shape[1]]
        self.shown = [] if flat else pictures_in(ids)
        self.input_ids = self._tensor([with_placeholders(ids) if self.shown else ids])
        self.position_ids = self._tensor([positions]) if flat else self._tensor(positions).T[:, None]
        self.scored, self.labels, self._cells = self._tensor(scored), self._tensor([labels]), self._tensor(cells)

    def _tensor(self, values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)

    def __len__(self) -> int:
        return self.input_ids.shape[1]

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """(1, S) of the wanted tokens as (B, C) of the batch, 0 elsewhere."""
        rows, width = self.shape
        flat = values.new_zeros(rows * width + 1).index_copy(0, self._cells.to(values.device), values[0])
        return flat[:-1].view(rows, width)

    @cached_property
    def lengths(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
        """Where the tokens stand that each segment reads; ends of the segments and of these; the longest of both."""
        places = torch.arange(len(self)).split(self.sizes)
        keys = torch.cat([places[k] for reads in self.reads for k in reads])
        ends = (torch.tensor([0, *each]).cumsum(0, dtype=torch.int32) for each in (self.sizes, self.num_keys))
        return *(each.to(self.device) for each in (keys, *ends)), max(self.sizes), max(self.num_keys)

    def forget_masks(self) -> None:
        """Free the masks after the last pass that reads this row, which is the backward pass if there is one."""
        self._masks.clear()

    def mask(self, length: int, num_keys: int, like: torch.Tensor) -> torch.Tensor | None:
        """The additive mask (length, num_keys) of queries that are the last ones of the keys. None if they read all.

        It is a view of one mask, made once for all layers in their type: what SDPA makes of booleans is kept for each
        layer. The view begins at a multiple of 8 columns and has such a stride, else GPUs would need a copy of it.
        """
        if length == 1:
            return None
        if (key := (like.dtype, like.device)) not in self._masks:
            height, width = min(BLOCK, max(self.sizes)) + 7, -(-max(self.num_keys) // 8) * 8
            hidden = torch.full((height, width), float("-inf"), dtype=like.dtype, device=like.device)
            self._masks[key] = hidden.triu_(width - height + 1)
        below, right = (size - -num_keys % 8 for size in self._masks[key].shape)
        return self._masks[key][below - length : below, right - num_keys : right]


def positions_of(ids: list[int], first: int, flat: bool) -> tuple[list[Any], int]:
    """(positions of a node's tokens from `first` on, the position after them).

    Where a row has images (it is not `flat`) each is (time, height, width), that of Qwen's models (M-RoPE, arXiv
    2409.12191). An image has one time; its rows and columns count from there. What follows begins after the largest.
    """
    if flat:
        return list(range(first, first + len(ids))), first + len(ids)
    positions: list[Any] = []
    for run in runs_of(ids):
        if is_picture(run[0]):
            height, width = picture_of(run[0]).grid
            positions += [(first, first + row, first + column) for row in range(height) for column in range(width)]
            first += max(height, width)
        else:
            positions += [(at, at, at) for at in range(first, first + len(run))]
            first += len(run)
    return positions, first


def kernel_of(query: torch.Tensor, key: torch.Tensor) -> Callable | None:
    """PyTorch's attention for sequences of different lengths: on GPUs, in half precision, where it works."""
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16):
        return None
    return working_kernel(query.shape[1], key.shape[1], query.shape[3], query.dtype, query.device)


@cache
def working_kernel(heads: int, key_heads: int, size: int, dtype: torch.dtype, device: torch.device) -> Callable | None:
    """The kernel, if it computes a small row of these heads, forward and backward. Else a warning says why not."""
    row = SharedRow({0: Example([1, 2], [3, 4], [1, 1]), 1: Example([1, 2], [5, 6], [1, 1])}, (2, 2), device)
    try:
        from torch.nn.attention.varlen import varlen_attn

        how = {"dtype": dtype, "device": device, "requires_grad": True}
        how["generator"] = torch.Generator(device).manual_seed(0)  # the run's own numbers go on as they would
        with torch.enable_grad():
            inputs = [torch.randn((1, number, len(row), size), **how) for number in (heads, key_heads, key_heads)]
            by_kernel(varlen_attn, *inputs, row, None).sum().backward()
    except Exception as error:  # of an older PyTorch, this GPU, or this size of heads
        logger.warning(f"PyTorch's varlen_attn does not work here. SDPA is used: {type(error).__name__}: {error}")
        return None
    return varlen_attn


def by_kernel(
    kernel: Callable, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: SharedRow, scale: float | None
) -> torch.Tensor:
    """Attention of all segments in one call, (1, L, heads, size of a head). The causal mask is aligned at the end."""
    keys, *lengths = row.lengths
    query, key, value = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))  # (L, heads, size of a head)
    grouped = query.shape[1] != key.shape[1]
    return kernel(query, key[keys], value[keys], *lengths, scale=scale, window_size=(-1, 0), enable_gqa=grouped)[None]


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    shared_row: SharedRow | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers: of a `SharedRow`, else SDPA's own.

    INVARIANT: the layout comes as an argument. Gradient checkpointing calls this again in the backward pass, when
    another row may be the present one.
    """
    if shared_row is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if torch.is_autocast_enabled(query.device.type):  # as SDPA does it, and once for the masks
        query, key, value = (x.to(torch.get_autocast_dtype(x.device.type)) for x in (query, key, value))
    if kernel := kernel_of(query, key):
        return by_kernel(kernel, query, key, value, shared_row, scaling), None
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.is_cuda:  # with a mask, SDPA would take a slow kernel for heads in groups
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        grouped = False
    outputs = []
    # Split, and not cut out one by one: each cut would have a gradient as long as the row.
    queries, keys, values = (x.split(shared_row.sizes, 2) for x in (query, key, value))
    for each, reads, num_keys in reversed(list(zip(queries, shared_row.reads, shared_row.num_keys))):
        read = [torch.cat([x[k] for k in reads], 2) if len(reads) > 1 else x[reads[0]] for x in (keys, values)]
        alone = each.shape[2] == num_keys > 1
        for block in reversed(each.split(num_keys if alone else BLOCK, 2)):
            mask = None if alone else shared_row.mask(block.shape[2], num_keys, query)
            masks = {"attn_mask": mask, "is_causal": alone, "scale": scaling, "enable_gqa": grouped}
            outputs.append(F.scaled_dot_product_attention(block, *read, **masks))
            num_keys -= block.shape[2]
            read = [x[:, :, :num_keys] for x in read]  # cut from the last one, so that gradients get shorter, too
    return torch.cat(outputs[::-1], 2).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)  # of ordinary rows; a `SharedRow` needs none


def keep_scored(module: Any, args: tuple, kwargs: dict, output: Any) -> Any:
    """A hook of a model without its head, which is as wide as the vocabulary: the head reads the wanted positions."""
    if (row := kwargs.get(KEYWORD)) is not None:
        output.last_hidden_state = output.last_hidden_state[:, row.scored]
    return output


def take_shared_rows(*models: PreTrainedModel | PeftModel | None) -> None:
    """Let models with SDPA read rows of either kind. For ordinary ones nothing changes."""
    for model in filter(None, models):
        model = model.get_base_model() if isinstance(model, PeftModel) else model
        model.config.get_text_config()._attn_implementation = NAME  # what reads the pixels keeps its own
        if keep_scored not in model.base_model._forward_hooks.values():  # a second trainer may get the same model
            model.base_model.register_forward_hook(keep_scored, with_kwargs=True)


def forward_inputs(row: SharedRow) -> dict[str, Any]:
    """Arguments of a model's forward, with TRL's fused head."""
    features: dict[str, torch.Tensor] = {}
    if row.shown:
        from mt_grpo.images.forward import features_of

        features = {name: values.to(row.device) for name, values in features_of(row.shown).items()}
    return {
        "input_ids": row.input_ids,
        "position_ids": row.position_ids,
        # A mask of four dimensions is taken as it is: none is made from the positions, and `attention` reads none.
        "attention_mask": row.input_ids.new_ones(1, 1, 1, 1),
        "shift_labels": row.labels,
        "fused_lm_head": True,
        KEYWORD: row,
        **features,
    }

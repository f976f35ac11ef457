"""Rows in which a prompt stands once: the records of its group behind it, without padding.

Records are laid out as a tree: what several of them begin with stands once, and behind it stand their own tokens. That
is the prompt of a group, what is alike in the prompts of several groups (a system prompt, schemas of tools), and what
a record of an edited history has in common with the one before it. Positions go on from what comes before. In the
attention a token reads what comes before it in its own record. So linear layers see nothing twice and no padding, and
each token has the hidden state that it has in a row of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftModel
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mt_grpo.images.pictures import features_of, is_picture, picture_of, pictures_in, runs_of, with_placeholders

logger = logging.getLogger(__name__)

NAME = "shared_prompts"  # of the attention function, as transformers knows it
FEWEST_SHARED = 16  # tokens for which a record is cut in two: each part costs a call of the attention
KEYWORD = "shared_row"  # the argument of a model's forward that says how a row is laid out


@dataclass
class Segment:
    """Tokens of a row that follow each other in a conversation. Segments follow each other in the row."""

    length: int
    context: tuple[int, ...] = ()  # the numbers of the segments before it in the conversation, in its order


@dataclass
class Example:
    """A record, of which some tokens are trained."""

    prompt_ids: list[int]  # at least one
    completion_ids: list[int]
    wanted: Sequence[int | bool]  # whether the logprob of a completion's token is wanted, for each of them


@dataclass(eq=False)
class Node:
    """Tokens of the tree that all records behind it have, at least one except for the root."""

    ids: list[int]
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)
    start: int = 0  # where they stand in the row, once it is laid out

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
                node.children.append(Node(ids[at:], node))
                return node.children[-1]
            if shared < len(child.ids):
                child = child.cut(shared)
            node, at = child, at + shared
        return node

    def cut(self, length: int) -> Node:
        """Take the first tokens into a node of their own, which stands before the rest, and return it."""
        upper = Node(self.ids[:length], self.parent, [self])
        self.parent.children[self.parent.children.index(self)] = upper
        self.ids, self.parent = self.ids[length:], upper
        return upper

    def path(self) -> list[Node]:
        """From below the root to this node."""
        found = [self]
        while found[-1].parent is not None:
            found.append(found[-1].parent)
        return found[-2::-1]


def common_length(one: list[int], other: list[int], start: int) -> int:
    """How many tokens of `one`, and of `other` from `start` on, are the same from the beginning.

    >>> common_length([1, 2, 3], [9, 1, 2, 4], 1)
    2
    """
    limit = min(len(one), len(other) - start)
    if one[:limit] == other[start : start + limit]:
        return limit
    return next(k for k in range(limit) if one[k] != other[start + k])


class SharedRow:
    """Examples, by their numbers among the B rows of a batch, as one row of L tokens of which S logprobs are wanted.

    `shape` is (B, C), that of the batch's completions. `input_ids` is (1, L), `position_ids` too, or (3, 1, L) of
    time, height and width where there are pictures. `scored`, (S,), is where the token before a wanted one stands, at
    least one; `labels`, (1, S), are the wanted tokens, -100 for one that nobody wants. `shown` are the pictures in
    their order, each once, and `segments` what the attention reads.

    >>> examples = {0: Example([1, 2, 3], [4, 5], [1, 1]), 1: Example([1, 2, 3], [6, 7, 8], [0, 1, 0])}
    >>> row = SharedRow(examples, (2, 3))
    >>> row.input_ids, row.position_ids  # behind a record's last wanted token nothing is computed
    (tensor([[1, 2, 3, 4, 6]]), tensor([[0, 1, 2, 3, 3]]))
    >>> row.scored, row.labels
    (tensor([2, 3, 4]), tensor([[4, 5, 7]]))
    >>> row.spread(torch.tensor([[-1.0, -2.0, -3.0]]))
    tensor([[-1., -2.,  0.],
            [ 0., -3.,  0.]])
    """

    def __init__(self, examples: dict[int, Example], shape: tuple[int, int], device: torch.device | str = "cpu"):
        self.shape, self.device = shape, torch.device(device)
        parts = [ids for each in examples.values() for ids in (each.prompt_ids, each.completion_ids)]
        self._flat = not is_picture(max((max(ids, default=0) for ids in parts), default=0))
        self._masks: dict[tuple, torch.Tensor | None] = {}
        root, ends = Node([]), {}
        for number, example in examples.items():
            if wanted := [k for k, flag in enumerate(example.wanted) if flag]:
                # The prompt first, so that it is whole for the group whatever its completions begin with.
                root.add(example.prompt_ids)
                ends[number] = root.add(example.prompt_ids + example.completion_ids[: wanted[-1]]), wanted
        if not ends:  # a model's forward pass needs one token, and the head one position
            root.add(next(iter(examples.values())).prompt_ids[-1:])
        self.segments, ids, positions = self._lay_out(root)
        scored, labels, cells = [], [], []
        for number, (end, wanted) in ends.items():
            example = examples[number]
            places = [node.start + k for node in end.path() for k in range(len(node.ids))]
            scored += [places[len(example.prompt_ids) + k - 1] for k in wanted]
            labels += [example.completion_ids[k] for k in wanted]
            cells += [number * shape[1] + k for k in wanted]
        if not ends:
            scored, labels, cells = [0], [-100], [shape[0] * shape[1]]
        self.shown = [] if self._flat else pictures_in(ids)
        self.input_ids = self._tensor([with_placeholders(ids) if self.shown else ids])
        self.position_ids = self._tensor([positions]) if self._flat else self._tensor(positions).T[:, None]
        self.scored, self.labels, self._cells = self._tensor(scored), self._tensor([labels]), self._tensor(cells)

    def _lay_out(self, root: Node) -> tuple[list[Segment], list[int], list[Any]]:
        """(segments, ids, positions): each node behind its parent."""
        segments: list[Segment] = []
        ids: list[int] = []
        positions: list[Any] = []
        waiting = [(node, (), 0) for node in reversed(root.children)]
        while waiting:
            node, context, first = waiting.pop()
            node.start = len(ids)
            here = (*context, len(segments))
            segments.append(Segment(len(node.ids), context))
            ids += node.ids
            own, behind = positions_of(node.ids, first, self._flat)
            positions += own
            waiting += [(child, here, behind) for child in reversed(node.children)]
        return segments, ids, positions

    def _tensor(self, values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)

    def __len__(self) -> int:
        return self.input_ids.shape[1]

    def features(self) -> dict[str, torch.Tensor]:
        """The image inputs of the model's forward pass, such as `pixel_values`."""
        return {name: values.to(self.device) for name, values in features_of(self.shown).items()}

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """(1, S) of the wanted tokens as (B, C) of the batch, 0 elsewhere."""
        rows, width = self.shape
        flat = values.new_zeros(rows * width + 1).index_copy(0, self._cells.to(values.device), values[0])
        return flat[:-1].view(rows, width)

    @cached_property
    def sizes(self) -> list[int]:
        return [segment.length for segment in self.segments]

    def num_before(self, segment: Segment) -> int:
        """The number of tokens of a segment's context."""
        return sum(self.sizes[k] for k in segment.context)

    @cached_property
    def lengths(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
        """The row as an attention kernel for sequences of different lengths reads it: each segment is one sequence.

        (where the tokens stand that each segment reads, its context and itself; sums of lengths so far of the
        segments, (segments + 1,), and of what they read; the longest of both).
        """
        places = torch.arange(len(self)).split(self.sizes)
        keys = [places[k] for number, segment in enumerate(self.segments) for k in (*segment.context, number)]
        num_keys = [self.num_before(segment) + segment.length for segment in self.segments]
        ends = (torch.tensor([0, *each]).cumsum(0, dtype=torch.int32) for each in (self.sizes, num_keys))
        return *(each.to(self.device) for each in (torch.cat(keys), *ends)), max(self.sizes), max(num_keys)

    def forget_masks(self) -> None:
        """Free the masks after the last pass that reads this row, which is the backward pass if there is one."""
        self._masks.clear()

    def mask(self, segment: Segment, like: torch.Tensor) -> torch.Tensor | None:
        """The additive attention mask of a segment, (its tokens, tokens that it reads). None if it reads all of them.

        It is made once for all layers, in the layers' type: what SDPA makes of booleans is kept for each layer.
        """
        if segment.length == 1:
            return None
        key = (segment.length, self.num_before(segment), like.dtype, like.device)
        if key not in self._masks:
            shape = segment.length, self.num_before(segment) + segment.length
            hidden = torch.full(shape, float("-inf"), dtype=like.dtype, device=like.device)
            self._masks[key] = hidden.triu(self.num_before(segment) + 1)
        return self._masks[key]


def positions_of(ids: list[int], first: int, flat: bool) -> tuple[list[Any], int]:
    """(positions of a node's tokens from `first` on, the position behind them).

    Where a row has pictures (it is not `flat`) each position is (time, height, width), that of Qwen's models (M-RoPE,
    arXiv 2409.12191): all three of text go on by 1. A picture has one time, and its rows and columns count from there.
    What follows begins behind the largest of them.

    >>> positions_of([7, 8], 3, True), positions_of([7, 8], 3, False)
    (([3, 4], 5), ([(3, 3, 3), (4, 4, 4)], 5))
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


KERNELS: dict[tuple, Callable | None] = {}  # by the heads, their size, type and device: what works for them


def kernel_of(query: torch.Tensor, key: torch.Tensor) -> Callable | None:
    """PyTorch's attention for sequences of different lengths: on GPUs, in half precision, where it works."""
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16):
        return None
    shape = (query.shape[1], key.shape[1], query.shape[3], query.dtype, query.device)
    if shape not in KERNELS:
        KERNELS[shape] = working_kernel(query, key)
    return KERNELS[shape]


def working_kernel(query: torch.Tensor, key: torch.Tensor) -> Callable | None:
    """The kernel, if it computes a small row of these heads, forward and backward. Else a warning says why not."""
    row = SharedRow({0: Example([1, 2], [3, 4], [1, 1]), 1: Example([1, 2], [5, 6], [1, 1])}, (2, 2), query.device)
    try:
        from torch.nn.attention.varlen import varlen_attn

        with torch.enable_grad():
            inputs = [
                torch.randn(1, like.shape[1], len(row), like.shape[3], dtype=like.dtype, device=like.device)
                for like in (query, key, key)
            ]
            by_kernel(varlen_attn, *(each.requires_grad_() for each in inputs), row, None).sum().backward()
    except Exception as error:  # of an older PyTorch, this GPU, or this size of heads
        logger.warning(f"PyTorch's varlen_attn does not work here. SDPA is used: {type(error).__name__}: {error}")
        return None
    return varlen_attn


def by_kernel(
    kernel: Callable, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: SharedRow, scale: float | None
) -> torch.Tensor:
    """Attention of all segments in one call, (1, L, heads, size of a head).

    A kernel's causal mask is aligned at the end: a segment's last token reads all of its keys.
    """
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
    dropout: float = 0.0,
    shared_row: SharedRow | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers: of a `SharedRow`, else SDPA's own.

    INVARIANT: the layout comes as an argument. Gradient checkpointing calls this again in the backward pass, when
    another row may be the present one.

    From (1, heads, L, size of a head) to (1, L, heads, size of a head), and no attention weights.
    """
    if shared_row is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    if torch.is_autocast_enabled(query.device.type):  # as SDPA does it, and once for the masks
        half = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(half) for x in (query, key, value))
    if kernel := kernel_of(query, key):
        return by_kernel(kernel, query, key, value, shared_row, scaling), None
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.is_cuda:  # with a mask, SDPA would take a slow kernel for heads in groups
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        grouped = False
    outputs = []
    # Split, and not cut out one by one: each cut would have a gradient as long as the row.
    queries, keys, values = (x.split(shared_row.sizes, 2) for x in (query, key, value))
    for number, segment in enumerate(shared_row.segments):
        reads = (*segment.context, number)
        own_keys, own_values = (
            torch.cat([x[k] for k in reads], 2) if segment.context else x[number] for x in (keys, values)
        )
        alone = not segment.context and segment.length > 1
        mask = None if alone else shared_row.mask(segment, query)
        masks = {"attn_mask": mask, "is_causal": alone, "scale": scaling, "enable_gqa": grouped}
        outputs.append(F.scaled_dot_product_attention(queries[number], own_keys, own_values, **masks))
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


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
    return {
        "input_ids": row.input_ids,
        "position_ids": row.position_ids,
        # A mask of four dimensions is taken as it is: none is made from the positions, and `attention` reads none.
        "attention_mask": row.input_ids.new_ones(1, 1, 1, 1),
        "shift_labels": row.labels,
        "fused_lm_head": True,
        KEYWORD: row,
        **row.features(),
    }

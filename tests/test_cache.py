"""The slot cache and the runner: cached logits are the uncached ones, whatever happened before."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import CONTEXT, FAMILIES, VOCAB, WINDOW, copied, shared, uncached
from torch import Tensor, nn

from specbench.decoding.processing import ancestors
from specbench.runtime import attention
from specbench.runtime.cache import SlotCache
from specbench.runtime.runner import ModelRunner, TreeWindow, decoder_layers

MAIN = ("llama", "gpt2", "qwen2", "qwen2-window", "mistral-window")
CASES = [(family, name) for family in MAIN for name in (attention.NAME, "sdpa", "eager")]
CASES += [("gemma2", "eager"), *((family, attention.NAME) for family in ("qwen3", "neox", "opt"))]
TOLERANCE = 1e-4

Slotted = Callable[[str], Any]


class Batch:
    """Rows that advance at their own pace; every forward is compared with plain forwards."""

    def __init__(self, model: Any, plain: Any, *, rows: int = 5, width: int = 48) -> None:
        self.model = model
        self.plain = plain
        self.runner = ModelRunner(model, SlotCache(rows, width))
        self.rows = rows
        self.held: list[list[int]] = []
        self.worst = 0.0

    def forward(self, offers: list[list[int]], *, first: int = 0, **options: Any) -> Tensor:
        """Offer tokens to rows `first` onward, compare every logit, and return them; nothing is kept."""
        counts = [len(offer) for offer in offers]
        tokens = torch.zeros(len(offers), max(counts), dtype=torch.int64)
        for row, offer in enumerate(offers):
            tokens[row, : len(offer)] = torch.tensor(offer)
        starts = [len(self.held[first + row]) for row in range(len(offers))]
        output = self.runner.forward(tokens, starts, counts, first_row=first, **options)
        for row, offer in enumerate(offers):
            if offer:
                want = uncached(self.plain, self.held[first + row] + offer)[starts[row] :]
                difference = float((output.logits[row, : len(offer)] - want).abs().max())
                assert difference == difference, "NaN"
                self.worst = max(self.worst, difference)
        return output.logits

    def advance(self, kept: list[list[int]], wrong: list[list[int]]) -> None:
        """Offer kept and wrong tokens to all rows, then keep only the former."""
        self.forward([good + bad for good, bad in zip(kept, wrong, strict=True)])
        for row, good in enumerate(kept):
            self.held[row] += good

    def admit(self, prompts: list[list[int]]) -> None:
        """Prefill new rows beside those in flight."""
        first = len(self.held)
        self.held += [[] for _ in prompts]
        self.forward(prompts, first=first)
        for row, prompt in enumerate(prompts):
            self.held[first + row] = list(prompt)

    def leave(self, row: int) -> None:
        """Take a row out; the last one moves into the gap."""
        last = len(self.held) - 1
        if row != last:
            self.runner.cache.copy_row(last, [row], len(self.held[last]))
            self.held[row] = self.held[last]
        self.held.pop()

    def fork(self, source: int) -> None:
        """Continue a row twice."""
        self.runner.cache.copy_row(source, [len(self.held)], len(self.held[source]))
        self.held.append(list(self.held[source]))

    def kv_difference(self) -> float:
        """Compare K and V below each row's committed length with a fresh prefill of its tokens."""
        worst = 0.0
        for row, tokens in enumerate(self.held):
            fresh = ModelRunner(self.model, SlotCache(1, len(tokens)))
            fresh.forward(torch.tensor([tokens]), [0], [len(tokens)])
            for mine, theirs in (
                (self.runner.cache.keys, fresh.cache.keys),
                (self.runner.cache.values, fresh.cache.values),
            ):
                assert mine.keys() == theirs.keys()
                for layer in mine:
                    held = mine[layer][row, :, : len(tokens)]
                    worst = max(worst, float((held - theirs[layer][0, :, : len(tokens)]).abs().max()))
        return worst


def a_batch(family: str, slotted: Slotted, **options: Any) -> Batch:
    return Batch(slotted(family), shared(family), **options)


MOVES = st.lists(
    st.tuples(st.sampled_from(["advance", "advance", "advance", "leave", "admit", "fork"]), st.integers()),
    min_size=2,
    max_size=9,
)


def play(batch: Batch, start: int, moves: list[tuple[str, int]]) -> None:
    """Play a random history of prefills, accepted and rejected tokens, leaving and forked rows."""

    def words(source: random.Random, low: int, high: int) -> list[int]:
        return [source.randrange(VOCAB) for _ in range(source.randint(low, high))]

    source = random.Random(start)
    batch.admit([words(source, 1, 10) for _ in range(source.randint(1, 3))])
    for move, number in moves:
        source = random.Random(number)
        num, room = len(batch.held), batch.rows - len(batch.held)
        if move == "leave" and num > 1:
            batch.leave(source.randrange(num))
        elif move == "fork" and room:
            batch.fork(source.randrange(num))
        elif move == "admit" and room:
            batch.admit([words(source, 1, 10) for _ in range(source.randint(1, room))])
        else:
            kept = [words(source, 1, 4) for _ in range(num)]
            batch.advance(kept, [words(source, 0, 4 - len(good)) for good in kept])


@pytest.mark.parametrize(("family", "name"), CASES)
@settings(max_examples=20)
@given(start=st.integers(), moves=MOVES)
def test_no_history_leaves_a_trace(family: str, name: str, start: int, moves: list[tuple[str, int]]) -> None:
    """After any history of ragged rows, logits equal uncached ones and K and V those of a fresh prefill."""
    batch = Batch(under(family, name), shared(family))
    play(batch, start, moves)
    assert batch.worst < TOLERANCE
    assert batch.kv_difference() < TOLERANCE


# --- trees ------------------------------------------------------------------------------------


def a_tree(source: random.Random, most: int) -> tuple[list[int], list[int]]:
    """Return tokens and parents of a random tree of up to so many nodes; parents come first, or are -1."""
    num = source.randint(0, most)
    return [source.randrange(VOCAB) for _ in range(num)], [
        source.choice((i - 1, source.randint(-1, i - 1))) for i in range(num)
    ]


def path_to(node: int, parents: list[int]) -> list[int]:
    """Return the nodes from the top down to one; none for -1."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def grow(batch: Batch, source: random.Random, *, cut: int = 0, compact: bool = True) -> int:
    """Verify a token and a random tree in every row, and keep a random path; return the deepest level.

    The logits after each node are compared with plain forwards of its path. With `cut` the window is
    computed in two forwards, the first `cut` tokens of it in the first, as a draft grows a tree.
    """
    rows = range(len(batch.held))
    last = [source.randrange(VOCAB) for _ in rows]
    trees = [a_tree(source, 7) for _ in rows]
    width = max(len(nodes) for nodes, _ in trees)
    tokens, parents = torch.zeros(len(rows), 1 + width, dtype=torch.int64), torch.full((len(rows), width), -1)
    for row, (nodes, above) in enumerate(trees):
        tokens[row, : 1 + len(nodes)] = torch.tensor([last[row], *nodes])
        parents[row, : len(nodes)] = torch.tensor(above)
    window = TreeWindow.to_verify(ancestors(parents))
    starts = [len(held) for held in batch.held]
    counts = [1 + len(nodes) for nodes, _ in trees]
    got = torch.zeros(len(rows), 1 + width, VOCAB)
    for begin, end in ((0, cut), (cut, 1 + width)) if 0 < cut <= width else ((0, 1 + width),):
        part = TreeWindow(window.depths, window.visible[:, begin:end], begin)
        wanted = [max(0, min(count, end) - begin) for count in counts]
        if any(wanted):
            places = [start + begin for start in starts]
            some = batch.runner.forward(tokens[:, begin:end], places, wanted, tree=part).logits
            got[:, begin : begin + some.shape[1]] = some
    moves = []
    for row, (nodes, above) in enumerate(trees):
        for node in range(-1, len(nodes)):
            path = path_to(node, above)
            text = [*batch.held[row], last[row], *(nodes[each] for each in path)]
            difference = float((got[row, 1 + node] - uncached(batch.plain, text)[-1]).abs().max())
            assert difference == difference, "NaN"
            batch.worst = max(batch.worst, difference)
        path = path_to(source.randint(-1, len(nodes) - 1), above)
        moves += [
            (row, starts[row] + 1 + node, starts[row] + 1 + place)
            for place, node in enumerate(path)
            if node != place
        ]
        batch.held[row] += [last[row], *(nodes[each] for each in path)]
    if compact:
        batch.runner.cache.compact(moves)
    return int(window.depths.max())


@pytest.mark.parametrize(("family", "name"), CASES)
@pytest.mark.parametrize("cut", [0, 3])
def test_trees_of_any_shape_see_their_ancestors_only(family: str, name: str, cut: int) -> None:
    """Ragged random trees give the uncached logits of each path, within sliding windows and beyond them.

    After each round a path is kept and compacted; K and V are then those of a fresh prefill.
    """
    source = random.Random(f"{family} {name} {cut}")
    batch = Batch(under(family, name), shared(family), rows=3, width=72)
    batch.admit([[source.randrange(VOCAB) for _ in range(length)] for length in (9, 1, 4)])
    deepest = max(grow(batch, source, cut=cut) for _ in range(6))
    assert deepest >= 4
    assert max(map(len, batch.held)) > 2 * WINDOW
    assert batch.worst < TOLERANCE
    assert batch.kv_difference() < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2-window", "gemma2"])
def test_a_single_tree(family: str, slotted: Slotted) -> None:
    """The same for one row alone, which takes the path without padding."""
    source = random.Random(7)
    batch = a_batch(family, slotted, rows=1, width=64)
    batch.admit([[source.randrange(VOCAB) for _ in range(8)]])
    for _ in range(6):
        grow(batch, source)
    assert batch.worst < TOLERANCE
    assert batch.kv_difference() < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2-window", "gemma2"])
def test_a_kept_path_that_is_not_compacted_shows(family: str, slotted: Slotted) -> None:
    """Left where verification put it, an accepted path makes later logits wrong: the test above can fail."""
    source = random.Random(7)
    batch = a_batch(family, slotted, rows=3, width=72)
    batch.admit([[1, 2, 3], [4], [5, 6]])
    for _ in range(4):
        grow(batch, source, compact=False)
    assert batch.worst > 100 * TOLERANCE


@pytest.mark.parametrize("family", ["mistral-window", "qwen2-window", "gemma2"])
def test_a_tree_that_ignores_the_window_shows(family: str, slotted: Slotted) -> None:
    """With a window that is too long by a token the logits of trees are wrong: it was crossed above."""
    source = random.Random(7)
    batch = a_batch(family, slotted, rows=3, width=72)
    batch.admit([[1, 2, 3, 4, 5, 6], [4], [5, 6]])
    assert batch.worst < TOLERANCE
    assert batch.runner._window == WINDOW
    batch.runner._window = WINDOW + 1
    for _ in range(4):
        grow(batch, source)
    assert batch.worst > 100 * TOLERANCE


_under: dict[tuple[str, str], Any] = {}


def under(family: str, name: str) -> Any:
    """Return a family's model under an attention implementation, the same object every time."""
    if (family, name) not in _under:
        _under[family, name] = copied(shared(family), name)
    return _under[family, name]


@pytest.mark.parametrize("family", MAIN)
def test_a_row_alone_equals_the_row_in_a_padded_batch(family: str, slotted: Slotted) -> None:
    """The path of one row without padding, and without a mask, gives the logits of the general path."""
    prompt, longer = [3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8]
    alone, together = a_batch(family, slotted), a_batch(family, slotted)
    alone.admit([prompt])
    together.admit([prompt, longer])
    for token, other in ((7, [1, 2, 3]), (2, [4]), (8, [5, 6])):
        alone.held, saved = [alone.held[0]], alone.held[0]
        single = alone.forward([[token]])[0, 0]
        batched = together.forward([[token], other])[0, 0]
        torch.testing.assert_close(single, batched, atol=TOLERANCE, rtol=0)
        alone.held[0] = [*saved, token]
        together.held = [[*together.held[0], token], together.held[1] + other]
    assert max(alone.worst, together.worst) < TOLERANCE


@pytest.mark.parametrize("family", MAIN)
def test_rows_below_the_first_one_are_left_alone(family: str, slotted: Slotted) -> None:
    """A forward that begins at row 2 changes no slot of rows 0 and 1."""
    batch = a_batch(family, slotted)
    batch.admit([[1, 2, 3], [4, 5, 6, 7]])
    before = {layer: keys[:2].clone() for layer, keys in batch.runner.cache.keys.items()}
    batch.admit([[8, 9], [10, 11, 12, 13, 14]])
    for layer, keys in batch.runner.cache.keys.items():
        width = batch.runner.cache.width
        torch.testing.assert_close(keys[:2, :, :width], before[layer][:, :, :width], atol=0, rtol=0)
    assert batch.worst < TOLERANCE


@pytest.mark.parametrize("family", MAIN)
def test_a_row_may_begin_beside_one_under_way(family: str, slotted: Slotted) -> None:
    """A row's first tokens may share a forward with those of a row under way that ends at the same slot."""
    batch = a_batch(family, slotted)
    batch.admit([[1, 2], [3]])
    batch.held[1] = []
    batch.advance([[4, 5, 6], [7, 8, 9, 1, 2]], [[], []])
    assert batch.worst < TOLERANCE
    assert batch.kv_difference() < TOLERANCE


@pytest.mark.parametrize("family", MAIN)
def test_a_row_may_sit_out(family: str, slotted: Slotted) -> None:
    """A row that offers no token in a forward continues afterwards as if it had not happened."""
    batch = a_batch(family, slotted)
    batch.admit([[1, 2, 3, 4, 5, 6, 7], [4, 5], [6]])
    batch.advance([[2], [], [3, 4]], [[], [], []])
    batch.advance([[], [7], [1]], [[], [8, 8], []])
    batch.advance([[3], [1], [1]], [[4], [], [5, 5]])
    assert batch.worst < TOLERANCE
    assert batch.kv_difference() < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_slot_of_the_context_can_be_used(family: str, slotted: Slotted) -> None:
    """A row filled to the model's context gives uncached logits while a shorter one is padded beyond it."""
    batch = a_batch(family, slotted, rows=2, width=CONTEXT)
    long = [(7 * i) % VOCAB for i in range(CONTEXT - 3)]
    batch.admit([long, [1, 2]])
    batch.advance([[3], [4]], [[], [5, 6, 7, 8]])
    batch.advance([[3, 1], [4]], [[], []])
    assert len(batch.held[0]) == CONTEXT
    assert batch.worst < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2-window", "gemma2"])
def test_only_the_logits_asked_for_are_returned(family: str, slotted: Slotted) -> None:
    """`keep` picks one position of each row, whatever the others' are."""
    runners = [ModelRunner(slotted(family), SlotCache(3, 32)) for _ in range(3)]
    runners[2]._keeps_logits = False  # a model whose forward cannot leave logits out
    tokens = torch.randint(0, VOCAB, (3, 9), generator=torch.Generator().manual_seed(0))
    counts, keep = [9, 4, 6], [8, 3, 0]
    full = runners[0].forward(tokens, [0, 0, 0], counts).logits
    for runner in runners[1:]:
        some = runner.forward(tokens, [0, 0, 0], counts, keep=keep).logits
        assert some.shape == (3, 1, VOCAB)
        for row, place in enumerate(keep):
            torch.testing.assert_close(some[row, 0], full[row, place], atol=TOLERANCE, rtol=0)


def truncated(model: Any, num: int) -> Any:
    """Return a copy of a model that has only its first layers."""
    twin = copy.deepcopy(model)
    parent, name = decoder_layers(twin)
    setattr(parent, name, getattr(parent, name)[:num])
    twin.config.num_hidden_layers = num
    return twin


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_layers_are_a_truncated_model(family: str, slotted: Slotted) -> None:
    """Running two of three layers over the shared cache equals a model with two; then three run again."""
    batch = a_batch(family, slotted)
    batch.admit([[1, 2, 3, 4, 5, 6, 7, 8], [9, 1]])
    shallow = truncated(shared(family), 2)
    held = batch.held
    few = batch.runner.first_layers(2)
    tokens = torch.tensor([[3, 4], [5, 0]])
    got = few.forward(tokens, [8, 2], [2, 1]).logits
    for row, offered in enumerate(([3, 4], [5])):
        want = uncached(shallow, held[row] + offered)[len(held[row]) :]
        torch.testing.assert_close(got[row, : len(offered)], want, atol=TOLERANCE, rtol=0)
    batch.advance([[6], [7, 8]], [[], [1]])
    assert batch.worst < TOLERANCE
    assert batch.kv_difference() < TOLERANCE


def test_a_failed_forward_leaves_the_model_whole(slotted: Slotted) -> None:
    """If a forward of the first layers raises, the model has all its layers and no hook afterwards."""
    model = copy.deepcopy(slotted("llama"))
    few = ModelRunner(model, SlotCache(1, 16)).first_layers(1)
    with pytest.raises(IndexError):
        few.forward(torch.tensor([[VOCAB + 5]]), [0], [1], feature_layers=(0,))
    parent, name = decoder_layers(model)
    layers: nn.ModuleList = getattr(parent, name)
    assert len(layers) == 3
    assert not any(layer._forward_hooks for layer in layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_the_hidden_states_of_transformers(family: str, slotted: Slotted) -> None:
    """Captured features equal `output_hidden_states` of a plain forward, for the layers asked for."""
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3]])
    runner = ModelRunner(slotted(family), SlotCache(1, 16))
    runner.forward(tokens[:, :7], [0], [7])
    features = runner.forward(tokens[:, 7:], [7], [3], feature_layers=(0, 1)).features
    with torch.inference_mode():
        states = shared(family)(input_ids=tokens, use_cache=False, output_hidden_states=True).hidden_states
    assert features.keys() == {0, 1}
    for layer, feature in features.items():
        torch.testing.assert_close(feature[0], states[layer + 1][0, 7:], atol=TOLERANCE, rtol=0)
    assert runner.forward(tokens[:, :1], [10], [1]).features == {}


@pytest.mark.parametrize("family", MAIN)
def test_bfloat16_stays_close(family: str, slotted: Slotted) -> None:
    """In bfloat16 the mean difference of cached from uncached logits is below 2 % of their spread."""
    model, plain = (copy.deepcopy(m).to(torch.bfloat16) for m in (slotted(family), shared(family)))
    sequence = torch.randint(0, VOCAB, (24,), generator=torch.Generator().manual_seed(1)).tolist()
    runner = ModelRunner(model, SlotCache(2, 32))
    assert runner.forward(torch.tensor([sequence[:9]] * 2), [0, 0], [9, 4]).logits.dtype == torch.bfloat16
    rest = torch.tensor([sequence[9:13], sequence[4:8]])
    got = runner.forward(rest, [9, 4], [4, 2]).logits.float()
    want = uncached(plain, sequence).float()
    differences = torch.cat([(got[0] - want[9:13]).flatten(), (got[1, :2] - want[4:6]).flatten()])
    assert float(differences.abs().mean()) < 0.02 * float(want.std())


class Masks:
    """Records what a model is given as its attention mask."""

    def __init__(self, model: Any) -> None:
        self.seen: list[Any] = []
        self.handle = model.register_forward_pre_hook(self.record, with_kwargs=True)

    def record(self, module: Any, arguments: Any, named: dict[str, Any]) -> None:
        """Keep the mask of one forward."""
        self.seen.append(named["attention_mask"])


@pytest.mark.parametrize(
    ("name", "dtype"), [(attention.NAME, torch.bool), ("sdpa", torch.bool), ("eager", torch.float32)]
)
def test_masks_are_what_the_attention_can_read(name: str, dtype: torch.dtype) -> None:
    """Eager attention, which adds its mask, is given numbers; the others are given booleans."""
    batch = Batch(copied(shared("llama"), name), shared("llama"))
    batch.admit([[1, 2, 3], [4, 5]])
    masks = Masks(batch.model)
    batch.forward([[1], [2]])
    (mask,) = masks.seen
    assert mask.dtype == dtype
    assert mask.shape == (2, 1, 1, 4)
    visible = mask if dtype == torch.bool else mask == 0
    assert visible[:, 0, 0].tolist() == [[True] * 4, [True, True, True, False]]


def test_masks_are_per_kind_of_layer_where_the_model_has_two(slotted: Slotted) -> None:
    """A model with sliding and full layers is given both masks; the sliding one sees the last 6 slots."""
    batch = Batch(copy.deepcopy(slotted("qwen2-window")), shared("qwen2-window"))
    batch.admit([[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2]])
    masks = Masks(batch.model)
    batch.forward([[1], [2]])
    (mask,) = masks.seen
    assert mask.keys() == {"full_attention", "sliding_attention"}
    assert mask["full_attention"][0, 0, 0].tolist() == [True] * 10
    assert mask["sliding_attention"][0, 0, 0].tolist() == [False] * 4 + [True] * WINDOW
    assert mask["sliding_attention"][1, 0, 0].tolist() == [True] * 3 + [False] * 7


def test_no_mask_is_built_where_none_is_needed(slotted: Slotted) -> None:
    """With the own attention, a prefill and a single row's single token need no mask; a window does."""
    for family, expected in (("llama", [True, True, False]), ("mistral-window", [False, False, False])):
        batch = Batch(copy.deepcopy(slotted(family)), shared(family))
        masks = Masks(batch.model)
        batch.admit([[1, 2, 3, 4, 5, 6, 7, 8]])
        batch.forward([[1]])
        batch.forward([[1, 2]])
        assert [mask is None for mask in masks.seen] == expected


def test_a_plain_forward_after_a_ragged_one(slotted: Slotted) -> None:
    """A forward of the model itself, outside the runner, is not taken for part of the packed batch before."""
    batch = a_batch("llama", slotted)
    batch.admit([[1, 2, 3], [4]])
    text = [5, 6, 7, 8]
    want = uncached(shared("llama"), text)
    torch.testing.assert_close(uncached(batch.model, text), want, atol=TOLERANCE, rtol=0)


def test_unused_slots_are_zero(slotted: Slotted) -> None:
    """Slots that no token was written to hold zeros, so that nothing masked can poison an output."""
    batch = a_batch("llama", slotted)
    batch.admit([[1, 2, 3]])
    for stored in (*batch.runner.cache.keys.values(), *batch.runner.cache.values.values()):
        assert not stored[0, :, 3:].any()
        assert not stored[1:].any()


def test_bytes_per_token_counts_both_tensors_of_every_layer(slotted: Slotted) -> None:
    """Three layers of two KV heads of eight float32 numbers take 3 * 2 * 2 * 8 * 4 bytes a token."""
    batch = a_batch("llama", slotted)
    assert batch.runner.cache.bytes_per_token == 0
    batch.admit([[1]])
    assert batch.runner.cache.bytes_per_token == 3 * 2 * 2 * 8 * 4


@pytest.mark.parametrize("option", ["softcap", "s_aux", "position_bias"])
def test_the_own_attention_refuses_terms_it_does_not_compute(option: str) -> None:
    """A term that would silently be left out raises instead."""
    query, key = torch.zeros(1, 2, 1, 4), torch.zeros(1, 1, 3, 4)
    with pytest.raises(attention.UnsupportedAttention, match=option):
        attention.slot_attention(nn.Identity(), query, key, key, None, **{option: 1.0})

"""The KDA layer: one function, whatever is packed beside it, however it is cut, padded or resumed."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kdaserve import ContractError, Snapshots, StatePool, ValuesError, plan_prefill
from kdaserve.nn import KimiDeltaAttention, LayerState
from kdaserve.nn.convolution import PackedInputs
from kdaserve.testing import assert_close, assert_same_bits

HIDDEN, SLOTS = 32, 7
TOLERANCE = 2e-5
GATES = {"bounded": -5.0, "softplus": None}


@pytest.fixture(params=GATES)
def layer(request: pytest.FixtureRequest) -> KimiDeltaAttention:
    torch.manual_seed(0)
    made = KimiDeltaAttention(HIDDEN, num_heads=2, head_dim=16, v_heads=4, lower_bound=GATES[request.param])
    torch.nn.init.uniform_(made.A_log)
    return made


def random_pool(layer: KimiDeltaAttention) -> StatePool:
    pool = StatePool(SLOTS, layers=2, **layer.state_sizes())
    generator = torch.Generator().manual_seed(1)
    for tensor in (pool.recurrent(0), pool.recurrent(1), pool.conv(0), pool.conv(1)):
        tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    return pool


def tokens(count: int, seed: int = 2) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def prefill(layer: KimiDeltaAttention, pool: StatePool, texts: list[Tensor], slots: list[int], fill: float = 0.0, **options) -> list[Tensor]:
    """Output rows of each text; packed, padded to a multiple of 64 rows with `fill`."""
    x = torch.cat([*texts, torch.full((-sum(map(len, texts)) % 64 + 64, HIDDEN), fill)])
    plan = plan_prefill(lengths=[len(t) for t in texts])
    y = layer.prefill(x[None], LayerState.of(pool, 1), torch.tensor(slots, dtype=torch.int64), plan, **options)[0]
    assert_same_bits(y[plan.tokens :], torch.zeros_like(y[plan.tokens :]), "output of padding rows")
    return list(y[: plan.tokens].split([len(t) for t in texts]))


def decode(layer: KimiDeltaAttention, pool: StatePool, x: Tensor, slots: list[int]) -> Tensor:
    return layer.decode(x, LayerState.of(pool, 1), torch.tensor(slots, dtype=torch.int64))


def state(pool: StatePool, slot: int) -> Tensor:
    return torch.cat([pool.recurrent(1)[slot].flatten(), pool.conv(1)[slot].flatten()])


def assert_untouched(pool: StatePool, before: StatePool, but: set[int]) -> None:
    for kind in ("recurrent", "conv"):
        kept = [slot for slot in range(SLOTS) if slot not in but]
        assert_same_bits(getattr(pool, kind)(1)[kept], getattr(before, kind)(1)[kept], f"{kind} state of slots no one named")
        assert_same_bits(getattr(pool, kind)(0), getattr(before, kind)(0), f"{kind} state of the other layer")


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("cut", [64, 128])
def test_a_prompt_in_two_parts_has_the_bits_of_the_whole(layer: KimiDeltaAttention, cut: int) -> None:
    x, whole, parts = tokens(200), random_pool(layer), random_pool(layer)
    (y,) = prefill(layer, whole, [x], [3])
    (first,), (second,) = prefill(layer, parts, [x[:cut]], [3]), prefill(layer, parts, [x[cut:]], [3])
    assert_same_bits(torch.cat([first, second]), y, "output")
    assert_same_bits(state(parts, 3), state(whole, 3), "state")


@pytest.mark.parametrize("prompt", [0, 1, 2, 3, 70])
def test_decode_goes_on_where_prefill_ended(layer: KimiDeltaAttention, prompt: int) -> None:
    x, whole, parts = tokens(prompt + 5), random_pool(layer), random_pool(layer)
    (y,) = prefill(layer, whole, [x], [3])
    prefill(layer, parts, [x[:prompt]], [3])
    steps = [decode(layer, parts, x[t : t + 1], [3]) for t in range(prompt, len(x))]
    assert_close(torch.cat(steps), y[prompt:], TOLERANCE, "output")
    assert_close(parts.recurrent(1)[3], whole.recurrent(1)[3], TOLERANCE, "recurrent state")
    assert_close(parts.conv(1)[3], whole.conv(1)[3], TOLERANCE, "convolution state")


@pytest.mark.usefixtures("threads")
def test_short_and_empty_sequences_packed_in_any_order_have_the_bits_they_have_alone(layer: KimiDeltaAttention) -> None:
    texts = [tokens(n, seed=n) for n in (0, 1, 70, 2, 0, 3, 64)]
    together, shuffled = random_pool(layer), random_pool(layer)
    y = prefill(layer, together, texts, [*range(SLOTS)])
    order = [5, 0, 6, 3, 4, 1, 2]
    z = prefill(layer, shuffled, [texts[n] for n in order], order)
    for n in range(SLOTS):
        alone = random_pool(layer)
        (expected,) = prefill(layer, alone, [texts[n]], [n])
        assert_same_bits(y[n], expected, f"output of sequence {n}")
        assert_same_bits(z[order.index(n)], expected, f"output of sequence {n}, shuffled")
        assert_same_bits(state(together, n), state(alone, n), f"state of sequence {n}")
        assert_same_bits(state(shuffled, n), state(alone, n), f"state of sequence {n}, shuffled")
        if not len(texts[n]):
            assert_same_bits(state(together, n), state(random_pool(layer), n), f"state of empty sequence {n}")


@torch.no_grad()
def test_the_convolution_is_that_of_torch(layer: KimiDeltaAttention) -> None:
    x, pool = tokens(10), random_pool(layer)
    past = pool.conv(1)[2].clone()
    weight = torch.cat([layer.q_conv1d.weight, layer.k_conv1d.weight, layer.v_conv1d.weight])
    inputs = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], -1)
    expected = F.silu(F.conv1d(torch.cat([past, inputs.mT], -1)[None], weight, groups=len(weight)))[0].mT
    actual = PackedInputs(inputs, past[None], plan_prefill(lengths=[10])).convolve(weight[:, 0])
    assert_close(actual, expected, 1e-6, "convolution")
    prefill(layer, pool, [x], [2])
    assert_close(pool.conv(1)[2], inputs[-3:].mT, 1e-6, "convolution state")


def test_snapshots_hold_the_state_of_a_run_cut_there(layer: KimiDeltaAttention) -> None:
    texts, pool = [tokens(130, 5), tokens(2, 6), tokens(0), tokens(100, 7)], random_pool(layer)
    saved = [(0, 64, 4), (0, 128, 5), (3, 100, 6), (9, 77, -1)]
    columns = [list(column) for column in zip(*saved, strict=True)]
    slots = [0, 1, 2, -1]
    prefill(layer, pool, texts, slots, snapshots=Snapshots(*columns))
    for sequence, count, slot in saved[:3]:
        cut = random_pool(layer)
        if slots[sequence] < 0:
            cut.recurrent(1)[0], cut.conv(1)[0] = 0, 0
        prefill(layer, cut, [texts[sequence][:count]], [0])
        assert_same_bits(state(pool, slot), state(cut, 0), f"snapshot of sequence {sequence} after {count} tokens")
    assert_untouched(pool, random_pool(layer), {0, 1, 4, 5, 6})


def test_snapshots_of_tokens_before_the_third_reach_back_into_the_old_state(layer: KimiDeltaAttention) -> None:
    pool, x = random_pool(layer), tokens(2)
    prefill(layer, pool, [x, tokens(0)], [0, 1], snapshots=Snapshots([0, 1, 0], [2, 0, 0], [4, 5, 6]))
    before = random_pool(layer)
    assert_same_bits(state(pool, 4), state(pool, 0), "snapshot at the length")
    assert_same_bits(state(pool, 5), state(before, 1), "snapshot of an empty sequence")
    assert_same_bits(state(pool, 6), state(before, 0), "snapshot after no token")
    assert_same_bits(pool.conv(1)[4][:, 0], before.conv(1)[0][:, 2], "the oldest input")


@pytest.mark.parametrize("slots", [[3, 5], [-1, 5], [-1, -1]])
def test_poisoned_padding_changes_nothing(layer: KimiDeltaAttention, slots: list[int]) -> None:
    texts, clean, poisoned = [tokens(65, 1), tokens(3, 2)], random_pool(layer), random_pool(layer)
    for slot in set(range(SLOTS)) - {*slots}:
        poisoned.recurrent(1)[slot], poisoned.conv(1)[slot] = torch.nan, torch.nan
    before = copy.deepcopy(poisoned)
    expected = prefill(layer, clean, texts, slots)
    for actual, wanted in zip(prefill(layer, poisoned, texts, slots, fill=torch.nan), expected, strict=True):
        assert_same_bits(actual, wanted, "output")
    for slot in slots:
        if slot >= 0:
            assert_same_bits(state(poisoned, slot), state(clean, slot), f"slot {slot}")
    assert_untouched(poisoned, before, {*slots})


def test_a_negative_slot_starts_from_zero(layer: KimiDeltaAttention) -> None:
    pool, zero = random_pool(layer), StatePool(SLOTS, layers=2, **layer.state_sizes())
    (y,), (expected,) = prefill(layer, pool, [tokens(70)], [-1]), prefill(layer, zero, [tokens(70)], [0])
    assert_same_bits(y, expected, "output")
    assert_untouched(pool, random_pool(layer), set())


@pytest.mark.parametrize("slots", [[0, -1, 4, -1], [-1, 0, -3, 4], [-1, -1, -1, -1]])
def test_decode_skips_padding(layer: KimiDeltaAttention, slots: list[int]) -> None:
    pool, before, x = random_pool(layer), random_pool(layer), tokens(4)
    for row, slot in enumerate(slots):
        if slot < 0:
            x[row] = torch.nan
    y = decode(layer, pool, x, slots)
    for row, slot in enumerate(slots):
        alone, batch = random_pool(layer), torch.zeros(4, HIDDEN)
        if slot < 0:
            assert_same_bits(y[row], torch.zeros(HIDDEN), f"output of padding row {row}")
            continue
        batch[2] = x[row]
        assert_same_bits(y[row], decode(layer, alone, batch, [-1, -1, slot, -1])[2], f"output of row {row}")
        assert_same_bits(state(pool, slot), state(alone, slot), f"slot {slot}")
    assert_untouched(pool, before, {*slots})


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2])
def test_steps_without_sequences_or_tokens(layer: KimiDeltaAttention, rows: int, learns: bool) -> None:
    pool = random_pool(layer)
    layer.requires_grad_(learns)
    for lengths in ([], [0, 0]):
        x = torch.full((1, rows, HIDDEN), torch.nan)
        y = layer.prefill(x, LayerState.of(pool, 1), torch.arange(len(lengths)), plan_prefill(lengths=lengths))
        assert_same_bits(y, torch.zeros_like(x), "output")
    assert_same_bits(decode(layer, pool, torch.zeros(0, HIDDEN), []), torch.zeros(0, HIDDEN), "output")
    assert_untouched(pool, random_pool(layer), set())


def test_wrong_slots_raise_and_write_nothing(layer: KimiDeltaAttention) -> None:
    pool, plan = random_pool(layer), plan_prefill(lengths=[5, 5])
    for slots, kind in (([0, SLOTS], ValuesError), ([2, 2], ValuesError), ([0, 1, 2], ContractError)):
        with pytest.raises(kind):
            layer.prefill(tokens(10)[None], LayerState.of(pool, 1), torch.tensor(slots), plan)
    for slots in ([0, SLOTS], [2, 2]):
        with pytest.raises(ValuesError):
            decode(layer, pool, tokens(2), slots)
    assert_untouched(pool, random_pool(layer), set())


def test_forward_is_prefill_from_zero(layer: KimiDeltaAttention) -> None:
    x = tokens(3 * 70).view(3, 70, HIDDEN)
    pool = StatePool(SLOTS, layers=2, **layer.state_sizes())
    expected = prefill(layer, pool, list(x), [0, 1, 2])
    assert_close(layer(x), torch.stack(expected), 1e-6, "output")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-5)])
def test_gradients_reach_every_parameter_and_are_those_of_the_reference(layer: KimiDeltaAttention, dtype: torch.dtype, tolerance: float) -> None:
    layer, weight = layer.to(dtype), tokens(2 * 66, 9).view(2, 66, HIDDEN).to(dtype)
    gradients = {}
    for backend in ("torch", "reference"):
        x = tokens(2 * 66).view(2, 66, HIDDEN).to(dtype).requires_grad_()
        layer.zero_grad()
        (layer(x, backend) * weight).sum().backward()
        gradients[backend] = {"x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}
    for name, expected in gradients["reference"].items():
        assert expected is not None, name
        assert expected.any(), name
        assert_close(gradients["torch"][name], expected, tolerance, f"gradient of {name}")


def test_gradients_ignore_poisoned_padding_and_leave_the_pool_alone(layer: KimiDeltaAttention) -> None:
    gradients, plan = [], plan_prefill(lengths=[5, 2])
    for fill in (0.0, torch.nan):
        pool, x = random_pool(layer), torch.cat([tokens(7), torch.full((3, HIDDEN), fill)])
        layer.zero_grad()
        layer.prefill(x[None], LayerState.of(pool, 1), torch.tensor([4, -1]), plan).sum().backward()
        assert not pool.recurrent(1).requires_grad
        assert not pool.conv(1).requires_grad
        gradients.append([p.grad for p in layer.parameters()])
    for clean, poisoned in zip(*gradients, strict=True):
        assert_same_bits(poisoned, clean, "gradient")


CHECKPOINT = {
    "q_proj.weight": (32, HIDDEN),
    "k_proj.weight": (32, HIDDEN),
    "v_proj.weight": (64, HIDDEN),
    "q_conv1d.weight": (32, 1, 4),
    "k_conv1d.weight": (32, 1, 4),
    "v_conv1d.weight": (64, 1, 4),
    "f_a_proj.weight": (16, HIDDEN),
    "f_b_proj.weight": (64, 16),
    "b_proj.weight": (4, HIDDEN),
    "A_log": (1, 1, 4, 1),
    "dt_bias": (64,),
    "g_a_proj.weight": (16, HIDDEN),
    "g_b_proj.weight": (64, 16),
    "o_norm.weight": (16,),
    "o_proj.weight": (HIDDEN, 64),
}


def test_takes_a_layer_of_a_public_checkpoint(layer: KimiDeltaAttention) -> None:
    weights = {name: torch.randn(shape) for name, shape in CHECKPOINT.items()}
    parent = torch.nn.ModuleDict({"attention": layer})
    parent.load_state_dict({f"attention.{name}": w for name, w in weights.items()})
    for name, parameter in layer.named_parameters():
        assert_same_bits(parameter, weights[name].flatten() if name == "A_log" else weights[name], name)
    assert weights["A_log"].shape == (1, 1, 4, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_low_precision_the_gate_parameters_stay_in_fp32(layer: KimiDeltaAttention, dtype: torch.dtype) -> None:
    low, wide, x = copy.deepcopy(layer), layer, tokens(70)
    for name in ("A_log", "dt_bias"):
        getattr(low, name).grad = torch.ones_like(getattr(low, name))
    low.to(dtype)
    assert {p.dtype for p in low.parameters()} == {dtype, torch.float32}
    for name in ("A_log", "dt_bias"):
        assert_same_bits(getattr(low, name), getattr(wide, name), name)
        assert getattr(low, name).grad.dtype == torch.float32
    pools = random_pool(layer), random_pool(layer)
    plan, slots = plan_prefill(lengths=[70]), torch.tensor([3])
    expected = wide.prefill(x[None], LayerState.of(pools[0], 1), slots, plan)
    actual = low.prefill(x[None].to(dtype), LayerState.of(pools[1], 1), slots, plan)
    assert actual.dtype == dtype
    assert_close(actual.float(), expected, 0.03, "prefill")
    steps = [m.decode(x[:1].to(t), LayerState.of(pool, 1), slots) for m, t, pool in zip((wide, low), (torch.float32, dtype), pools, strict=True)]
    assert steps[1].dtype == dtype
    assert_close(steps[1].float(), steps[0], 0.03, "decode")

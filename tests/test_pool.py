"""`StatePool`: slots are handed out zeroed, once each, and kernels work on its views in place."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import Target
from kdaserve import ContractError, PoolError, StatePool
from kdaserve.testing import assert_same_bits, decode_inputs, prefill_inputs

SIZES = {"v_heads": 2, "k_dim": 16, "v_dim": 32}


def test_shapes_and_strides(device: str):
    pool = StatePool(5, 3, **SIZES, conv_channels=10, conv_width=4, dtype=torch.bfloat16, device=device)
    assert (pool.slots, pool.free_slots) == (5, 5)
    for layer in range(3):
        recurrent, conv = pool.recurrent(layer), pool.conv(layer)
        assert recurrent.shape == (5, 2, 32, 16)
        assert recurrent.dtype == torch.bfloat16
        assert conv.shape == (5, 10, 3)
        assert conv.dtype == torch.float32
        assert recurrent.device.type == conv.device.type == device
        assert recurrent[0].is_contiguous()
        assert conv[0].is_contiguous()
        assert recurrent.stride(0) == 3 * 2 * 32 * 16, "all layers of a slot lie together"
    assert pool.nbytes == 5 * 3 * (2 * 32 * 16 * 2 + 10 * 3 * 4)
    assert "5 slots" in repr(pool)


def test_layers_do_not_share_memory():
    pool = StatePool(2, 3, **SIZES, conv_channels=4)
    for layer in range(3):
        pool.recurrent(layer).fill_(layer + 1)
        pool.conv(layer).fill_(-layer - 1)
    for layer in range(3):
        assert (pool.recurrent(layer) == layer + 1).all()
        assert (pool.conv(layer) == -layer - 1).all()


def test_slots_come_lowest_first_and_end():
    pool = StatePool(3, 1, **SIZES)
    assert [pool.allocate() for _ in range(3)] == [0, 1, 2]
    assert pool.free_slots == 0
    with pytest.raises(PoolError, match=r"KDA127"):
        pool.allocate()
    pool.free(1)
    pool.free(0)
    assert [pool.allocate(), pool.allocate()] == [0, 1]


def test_a_reused_slot_is_zero(device: str):
    pool = StatePool(2, 2, **SIZES, conv_channels=4, device=device)
    slot = pool.allocate()
    for layer in range(2):
        pool.recurrent(layer).fill_(torch.nan)
        pool.conv(layer).fill_(torch.nan)
    pool.free(slot)
    assert pool.allocate() == slot
    for layer in range(2):
        assert not pool.recurrent(layer)[slot].any()
        assert not pool.conv(layer)[slot].any()
        assert pool.recurrent(layer)[1].isnan().all(), "another slot was touched"


def test_copy_and_fork_take_everything(device: str):
    pool = StatePool(4, 2, **SIZES, conv_channels=4, device=device)
    source, target = pool.allocate(), pool.allocate()
    for layer in range(2):
        for view in (pool.recurrent(layer), pool.conv(layer)):
            view.copy_(torch.randn(view.shape))
    kept = [(pool.recurrent(layer).clone(), pool.conv(layer).clone()) for layer in range(2)]
    pool.copy(source, target)
    child = pool.fork(source)
    assert child not in (source, target)
    for layer in range(2):
        for view, before in zip((pool.recurrent(layer), pool.conv(layer)), kept[layer], strict=True):
            for slot in (source, target, child):
                assert_same_bits(view[slot], before[source], f"slot {slot}, layer {layer}")
            assert_same_bits(view[3], before[3], "a slot that no one named")
            view[child] = 7
            assert_same_bits(view[source], before[source], "the parent after its child went on")


def test_a_failed_fork_takes_no_slot():
    pool = StatePool(1, 1, **SIZES)
    slot = pool.allocate()
    with pytest.raises(PoolError, match=r"KDA127"):
        pool.fork(slot)
    pool.free(slot)
    assert pool.free_slots == 1
    with pytest.raises(PoolError, match=r"KDA128"):
        pool.fork(slot)
    assert pool.free_slots == 1


@pytest.mark.parametrize("slot", [1, -1, 4, 99, None, "0"])
def test_slots_that_no_one_holds(slot: object):
    pool = StatePool(4, 1, **SIZES)
    held = pool.allocate()
    pool.recurrent(0).fill_(3.0)
    calls = {
        "free": lambda: pool.free(slot),
        "copy": lambda: pool.copy(held, slot),
        "copy from": lambda: pool.copy(slot, held),
        "fork": lambda: pool.fork(slot),
    }
    for what, call in calls.items():
        with pytest.raises(PoolError, match=rf"KDA128.*StatePool\.{what.split()[0]}"):
            call()
        assert pool.free_slots == 3, what
    assert (pool.recurrent(0) == 3.0).all()


def test_a_slot_is_freed_once():
    pool = StatePool(2, 1, **SIZES)
    slot = pool.allocate()
    pool.free(slot)
    with pytest.raises(PoolError, match=r"KDA128"):
        pool.free(slot)
    assert sorted([pool.allocate(), pool.allocate()]) == [0, 1]


@given(steps=st.lists(st.tuples(st.sampled_from(["allocate", "free", "fork"]), st.integers(0, 5)), max_size=60))
def test_no_slot_has_two_owners(steps: list[tuple[str, int]]):
    pool, held = StatePool(4, 1, **SIZES), []
    for step, pick in steps:
        if step == "free" and held:
            pool.free(held.pop(pick % len(held)))
        elif step == "fork" and held and len(held) < 4:
            held.append(pool.fork(held[pick % len(held)]))
        elif step == "allocate" and len(held) < 4:
            held.append(pool.allocate())
        assert len(set(held)) == len(held)
        assert set(held) <= set(range(4))
        assert pool.free_slots == 4 - len(held)


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        *[({"slots": bad}, "slots") for bad in (0, -1, 2.0, True, None)],
        *[({"layers": bad}, "layers") for bad in (0, 1.5)],
        *[({"v_heads": bad}, "v_heads") for bad in (0, "2")],
        *[({"k_dim": bad}, "k_dim") for bad in (8, 17, 272, 0)],
        *[({"v_dim": bad}, "v_dim") for bad in (8, 17, 272)],
        *[({"conv_channels": bad}, "conv_channels") for bad in (-1, 2.0)],
        *[({"conv_width": bad}, "conv_width") for bad in (0, -2)],
        *[({"dtype": bad}, "dtype") for bad in (torch.int32, torch.bool)],
        ({"conv_dtype": torch.int8}, "conv_dtype"),
    ],
    ids=str,
)
def test_sizes_that_make_no_pool(changes: dict, argument: str):
    with pytest.raises(ContractError, match=f"KDA129.*`{argument}`"):
        StatePool(**{"slots": 2, "layers": 1, **SIZES, **changes})


@pytest.mark.parametrize("bad", ["16", 16.0, True, None])
def test_head_dimensions_of_the_wrong_type(bad: object):
    for name in ("k_dim", "v_dim"):
        with pytest.raises(ContractError, match=f"KDA129.*`{name}`"):
            StatePool(2, 1, **{**SIZES, name: bad})


def test_kernels_work_on_a_layer_in_place(target: Target, op: str):
    call = prefill_inputs([70, 5], slots=4, device=target.device)
    _, HV, V, K = call["initial_state"].shape
    pool = StatePool(4, 3, v_heads=HV, k_dim=K, v_dim=V, device=target.device)
    slots = [pool.allocate(), pool.allocate()]
    for layer in range(3):
        pool.recurrent(layer).copy_(call["initial_state"])
    call["initial_state_indices"] = torch.tensor(slots, device=target.device)
    target.check_prefill(op, call, initial_state=pool.recurrent(1))
    for layer in (0, 2):
        assert_same_bits(pool.recurrent(layer), call["initial_state"], f"layer {layer}")
    if "packed_decode_kda" not in target.row.ops:
        return
    target.check_decode(decode_inputs(2, slots=4, device=target.device), initial_state=pool.recurrent(1))
    for layer in (0, 2):
        assert_same_bits(pool.recurrent(layer), call["initial_state"], f"layer {layer}")


def test_a_fork_goes_its_own_way(target: Target):
    """A shared prefix, then two continuations: each as if it had run alone."""
    prefix = prefill_inputs([70], device=target.device)
    _, HV, V, K = prefix["initial_state"].shape
    pool = StatePool(3, 1, v_heads=HV, k_dim=K, v_dim=V, device=target.device)
    parent = pool.allocate()
    prefix["initial_state"] = pool.recurrent(0)
    target.run("chunk_kda", prefix | {"initial_state_indices": torch.tensor([parent], device=target.device)})
    child = pool.fork(parent)
    both = prefill_inputs([5, 9], seed=1, device=target.device) | {"initial_state": pool.recurrent(0)}
    target.check_prefill("chunk_kda", both | {"initial_state_indices": torch.tensor([child, parent], device=target.device)})

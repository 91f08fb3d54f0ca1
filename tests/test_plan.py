"""Chunk tables of a prefill step."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kdaserve import ContractError, PrefillPlan, ValuesError, plan_prefill


def check(plan: PrefillPlan, lengths: list[int], device: str = "cpu") -> None:
    """Every token of every sequence lies in exactly one chunk of the tables, and no chunk is empty."""
    assert plan.lengths == tuple(lengths)
    assert plan.tokens == sum(lengths)
    for table in (plan.cu_seqlens, plan.chunk_offsets, plan.chunk_indices):
        assert table.dtype == torch.int32
        assert table.device.type == device
    bounds, offsets, chunks = plan.cu_seqlens.tolist(), plan.chunk_offsets.tolist(), plan.chunk_indices.tolist()
    assert plan.chunk_indices.ndim == 2
    assert bounds == [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    assert chunks == sorted(chunks)
    assert offsets[-1] == len(chunks)
    for n, length in enumerate(lengths):
        own = chunks[offsets[n] : offsets[n + 1]]
        assert own == [[n, c] for c in range(len(own))]
        assert [t for _, c in own for t in range(64 * c, min(length, 64 * (c + 1)))] == list(range(length))
        assert all(64 * c < length for _, c in own)


@pytest.mark.parametrize(
    "lengths", [[], [0], [0, 0], [64], [65], [0, 0, 70], [1, 1, 128], [70, 0, 0, 5], [130, 0, 64], [0, 5, 0, 0, 64, 0], [63, 64, 65]], ids=str
)
def test_tables(lengths: list[int], device: str):
    check(plan_prefill(lengths=lengths, device=device), lengths, device)
    bounds = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    for dtype in (torch.int32, torch.int64):
        check(plan_prefill(torch.tensor(bounds, dtype=dtype, device=device)), lengths, device)


@given(lengths=st.lists(st.integers(0, 300), max_size=12))
def test_tables_of_any_lengths(lengths: list[int]):
    check(plan_prefill(lengths=lengths), lengths)


def test_what_a_plan_works_out_is_kept_for_all_layers(device: str):
    plan = plan_prefill(lengths=[130, 0, 7], device=device)
    assert plan.schedule(64, 8) is plan.schedule(64, 8)
    assert plan.schedule(64, 8) is not plan.schedule(1, 8)


def test_plans_share_no_memory(device: str):
    """Whoever writes into the tables of one step does not change those of the next."""
    plan = plan_prefill(lengths=[130, 0, 7], device=device)
    for table in (plan.cu_seqlens, plan.chunk_offsets, plan.chunk_indices):
        table.fill_(-1)
    check(plan_prefill(lengths=[130, 0, 7], device=device), [130, 0, 7], device)
    bounds = torch.tensor([0, 130, 130, 137], dtype=torch.int32, device=device)
    made = plan_prefill(bounds)
    bounds.fill_(-1)
    check(made, [130, 0, 7], device)


def test_a_plan_cannot_be_changed():
    plan = plan_prefill(lengths=[5])
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.lengths = (6,)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((torch.tensor([0, 5]),), {"lengths": [5]}),
        (([0, 5],), {}),
        ((torch.tensor([0.0, 5.0]),), {}),
        ((torch.tensor([[0, 5]]),), {}),
        ((torch.tensor([], dtype=torch.int32),), {}),
        ((torch.tensor(5),), {}),
        ((), {"lengths": [5, -1]}),
        ((), {"lengths": [5.0]}),
        ((), {"lengths": [True]}),
        ((), {"lengths": ["5"]}),
        ((), {"lengths": 5}),
        ((), {"lengths": torch.tensor([5, 3])}),
    ],
    ids=str,
)
def test_wrong_calls(args: tuple, kwargs: dict):
    with pytest.raises(ContractError, match=r"KDA126.*plan_prefill"):
        plan_prefill(*args, **kwargs)


@pytest.mark.parametrize("bounds", [[1, 5], [0, 5, 4], [-1, 5], [0, -5]], ids=str)
def test_boundaries_out_of_order(bounds: list[int]):
    with pytest.raises(ValuesError, match=r"KDA303"):
        plan_prefill(torch.tensor(bounds))


def test_a_misspelt_keyword_raises():
    with pytest.raises(TypeError, match="length"):
        plan_prefill(length=[5])

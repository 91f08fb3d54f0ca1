"""Whole prefill calls on Hopper's kernels against float64: the host code and both Gluon kernels; of calls without a token, Triton's.

Where there is no GPU the host code runs as it is, the Gluon kernels on `gluon_on_cpu`, and Triton's in its interpreter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import gluon_on_cpu
import oracle
from conftest import Call, Target
from kdaserve import Snapshots, backends, contract, dispatch, plan_prefill
from kdaserve.ops.jit.launch import INTERPRETED
from kdaserve.testing import assert_close, assert_same_bits, prefill_inputs

NAN = float("nan")
BF16, FP16 = torch.bfloat16, torch.float16
DATA = ("q", "k", "v", "g", "beta")
LENGTHS = [0, 1, 63, 0, 64, 65, 130, 0]
MANY = 10_000
"""Multiprocessors on which all programs run at once."""
(status,) = (status for status in backends() if status.name == "sm90")
if INTERPRETED:
    (sm90,) = gluon_on_cpu.load_modules("kdaserve.ops.chunk_kda.sm90", "")
    DEVICE = "cpu"
else:
    from kdaserve.ops.chunk_kda import sm90

    DEVICE = "cuda"
    pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not status.available, reason=status.reason)]
TARGET = Target("sm90", DEVICE)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """What sets how many multiprocessors the backend thinks there are; on one, most sequences wait for others. On a CPU it makes the backend run."""
    if INTERPRETED:
        (row,) = (row for row in dispatch.BACKENDS if row.name == "sm90")
        module = dispatch._module
        monkeypatch.setattr(dispatch, "BACKENDS", (dataclasses.replace(row, devices=("cpu",), unavailable=lambda: None),))
        monkeypatch.setattr(dispatch, "_module", lambda name: sm90 if name == row.module.format(op="chunk_kda") else module(name))

    def of_size(multiprocessors: int) -> None:
        monkeypatch.setattr(contract, "_remembered", {})
        monkeypatch.setattr(sm90, "processor", lambda device: (multiprocessors, 2**20))

    of_size(1)
    return of_size


def inputs(lengths: list[int], heads: int = 1, **options: Any) -> Call:
    return prefill_inputs(lengths, heads=heads, k_dim=128, v_dim=128, device=DEVICE, **{"dtype": BF16, **options})


def check(call: Call, correlated: bool = False, **changes: Any) -> Any:
    return TARGET.check_prefill("chunk_kda", call, correlated=correlated, **changes)


def track_all(call: Call, track: list[int]) -> Call:
    """Everything handed out: `h`, tracked states, and snapshots, of every sequence one at its start and one at its end."""
    lengths, pool = call["cu_seqlens"].diff().tolist(), call["initial_state"]
    slots, state = len(pool), pool.shape[1:]
    call["initial_state"] = torch.cat([pool, pool.new_full((2 * len(lengths), *state), NAN)])
    entries = [(n, t, slots + 2 * n + i) for n, length in enumerate(lengths) for i, t in enumerate((0, length)) if i == 0 or length]
    sequence, tokens, slot = map(list, zip(*entries, (0, 0, -1), strict=True))
    call |= {"snapshots": Snapshots(sequence, tokens, slot), "output_intermediate_states": True}
    call["track_state"] = torch.full((len(lengths), *state), 7.0, device=DEVICE)
    return call | {"track_chunk_idx": torch.tensor(track, dtype=torch.int32, device=DEVICE)}


# Lengths, slots, states


@pytest.mark.parametrize("multiprocessors", [1, MANY])
def test_sequences_of_all_lengths(hopper: Callable[[int], None], multiprocessors: int):
    hopper(multiprocessors)
    check(inputs(LENGTHS, 2))


def test_how_many_run_at_once_changes_no_bit(hopper: Callable[[int], None]):
    """It decides in which order the sequences start, and whether the chain is launched before prepare ends."""
    lengths, results = [3, 70, 1, 64, 0, 129, 5, 5], []
    for multiprocessors in (1, 4, MANY):
        hopper(multiprocessors)
        call = inputs(lengths, 2)
        results.append((TARGET.run("chunk_kda", call), call["initial_state"]))
    for o, pool in results[1:]:
        assert_same_bits(o, results[0][0], "output")
        assert_same_bits(pool, results[0][1], "pool")


def test_many_sequences():
    """Compared all together: of so many outputs of a token or two some are a small difference of large numbers."""
    call = inputs([1, 2, 0, 3] * 20)
    expected, slots = oracle.prefill(call), call["initial_state_indices"].long()
    assert_close(TARGET.run("chunk_kda", call).double().cpu(), expected.o, 1e-2, "output")
    states = torch.stack([states[length] for states, length in zip(expected.states, expected.lengths, strict=True)])
    assert_close(call["initial_state"][slots].double().cpu(), states, 1e-2, "states")


@pytest.mark.parametrize("eager", [False, True])
def test_negative_slots_and_padding(eager: bool):
    """A sequence that starts from zero and is not kept; NaN behind the last sequence."""
    call = inputs([70, 40, 64], 1, v_heads=2)
    call["initial_state_indices"][1] = -1
    for name in DATA:
        call[name] = torch.cat([call[name], torch.full_like(call[name], NAN)], 1)
    call["out"] = torch.full_like(call["v"], NAN)
    with gluon_on_cpu.eager(eager):
        check(call)


@pytest.mark.parametrize("lengths", [[0, 0], []], ids=str)
def test_nothing_but_padding(lengths: list[int]):
    call = inputs([70])
    bounds, slots = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, *lengths], [*range(len(lengths))]))
    check(call, cu_seqlens=bounds, initial_state_indices=slots)


@pytest.mark.parametrize("batched", [False, True])
def test_no_tokens_at_all(batched: bool):
    call = inputs([0, 0], batched=batched)
    check(call if batched else track_all(call, [-1, -1]))


@pytest.mark.parametrize(("dtype", "pool"), [(BF16, torch.float32), (BF16, BF16), (FP16, FP16), (FP16, torch.float32)], ids=str)
def test_states_handed_out(hopper: Callable[[int], None], dtype: torch.dtype, pool: torch.dtype):
    check(track_all(inputs([70, 0, 130, 64], dtype=dtype, pool_dtype=pool), [1, -1, -1, 0]))
    hopper(MANY)
    check(track_all(inputs([70, 0, 130, 64], 1, v_heads=2, dtype=dtype, pool_dtype=pool), [0, -1, 2, -1]))


@pytest.mark.parametrize("without", ["snapshots", "track_state", "output_intermediate_states"])
def test_some_of_the_states(without: str):
    call = track_all(inputs([70, 0, 130]), [1, -1, 2])
    for name in ("track_state", "track_chunk_idx") if without == "track_state" else (without,):
        del call[name]
    check(call)


# Forms of a call


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("length", [1, 64, 130])
def test_a_batch(length: int, heads: int):
    check(inputs([length] * 3, heads, v_heads=2, batched=True), output_intermediate_states=True)


def test_64_bit_indices():
    call = track_all(inputs([70, 65]), [1, -1])
    for name in ("cu_seqlens", "initial_state_indices", "track_chunk_idx"):
        call[name] = call[name].long()
    check(call)


def test_a_plan():
    call = inputs(LENGTHS)
    del call["cu_seqlens"]
    expected = TARGET.run("chunk_kda", {**call, "initial_state": call["initial_state"].clone()}, plan=plan_prefill(lengths=LENGTHS, device=DEVICE))
    o = TARGET.run("chunk_kda", {**inputs(LENGTHS)})
    assert_same_bits(o, expected, "output")


def test_nothing_is_remembered_of_a_tensor():
    """The same tensors with new contents, as a replayed graph sees them."""
    call = inputs([70, 5, 25], slots=8)
    for bounds, slots in (([0, 70, 75, 100], [0, 1, 2]), ([0, 1, 99, 99], [7, -1, 3]), ([0, 0, 0, 64], [2, 3, 4])):
        call["cu_seqlens"].copy_(torch.tensor(bounds))
        call["initial_state_indices"].copy_(torch.tensor(slots))
        call["initial_state"].mul_(0.5)
        check(call)


@pytest.mark.parametrize("gate", ["bounded", "softplus", "none"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("raw", [False, True])
def test_gates_and_betas(gate: str, dtype: torch.dtype, raw: bool):
    call = inputs([70, 5], 2, v_heads=4, gate=gate, dtype=dtype, beta_is_raw=raw)
    if gate != "none" and raw:
        call |= {"dt_bias": None, "scale": 0.3}
    check(call)


def test_beta_in_another_dtype():
    call = inputs([70, 5], 2, dtype=FP16)
    check(call, beta=call["beta"].float())


# Memory


def elsewhere(x: Tensor, gap: int, offset: int) -> Tensor:
    """The same in a buffer of NaN, `offset` elements behind its start, which is aligned, and with `gap` elements between the entries."""
    step = x[0].numel() + gap
    buffer = torch.full((offset + len(x) * step + 8,), NAN, dtype=x.dtype, device=DEVICE)
    return buffer.as_strided(x.shape, (step, *x.contiguous().stride()[1:]), offset).copy_(x)


@pytest.mark.parametrize("pad", [0, 8, 3])
def test_views_of_one_projection(pad: int):
    """Rows a multiple of 16 bytes apart are read where they are; others are copied."""
    call, H, HV = inputs([70, 65], 2, v_heads=4), 2, 4
    widths = [H * 128, H * 128, HV * 128, HV * 128, HV, pad + HV]
    packed = torch.full((1, 135, sum(widths)), NAN, dtype=BF16, device=DEVICE)
    for name, view in zip(DATA, packed.split(widths, -1), strict=False):
        call[name] = view.copy_(call[name].flatten(2)).unflatten(-1, call[name].shape[2:])
    assert all((sm90.tokens(call[name]) is not None) == (pad != 3) for name in "qkvg")
    check(call)


@pytest.mark.parametrize("name", [*DATA, "A_log", "dt_bias", "out", "initial_state", "track_state"])
def test_memory_that_is_not_aligned(name: str):
    call = track_all(inputs([70, 65], 2), [1, -1])
    call["out"] = torch.full_like(call["v"], NAN)
    call[name] = elsewhere(call[name], 0, 1)
    check(call)


@pytest.mark.parametrize("gap", [8, 2])
@pytest.mark.parametrize("name", [*DATA, "out"])
def test_rows_apart(name: str, gap: int):
    """And heads, which is nothing to a tensor map where it is by a multiple of 16 bytes; with padding behind the last sequence."""
    for batched in (False, True):
        call = inputs([65, 65], 2, batched=batched)
        if not batched:
            call["cu_seqlens"][-1] = 100
        call["out"] = torch.full_like(call["v"], NAN)
        x = call[name]
        whole = torch.full((*x.shape[:2], 3, *x.shape[3:-1], (x.shape[-1] if x.ndim == 4 else 1) + gap), NAN, dtype=x.dtype, device=DEVICE)
        call[name] = (whole[:, :, :2, :128] if x.ndim == 4 else whole[:, :, :2, 0]).copy_(x)
        check(call)
        rest = torch.ones_like(whole, dtype=torch.bool)
        rest[:, :, :2, : 128 if x.ndim == 4 else 1] = False
        assert bool(whole[rest].isnan().all())


@pytest.mark.parametrize("gap", [512, 24])
@pytest.mark.parametrize("name", [*DATA, "out"])
def test_entries_of_a_batch_apart(name: str, gap: int):
    """By whole rows, which a tensor map can show, or not."""
    call = inputs([65, 65], 2, batched=True)
    call["out"] = torch.full_like(call["v"], NAN)
    call[name] = elsewhere(call[name], gap, 8)
    assert name == "beta" or (sm90.tokens(call[name]) is not None) == (gap == 512)
    check(call)


def test_rows_too_far_apart_for_a_tensor_map_are_copied():
    for step in (2**38, 2**39 - 8):
        assert sm90.tokens(torch.empty_strided((1, 64, 1, 128), (0, step, 128, 1), dtype=BF16, device="meta"))
    assert not sm90.tokens(torch.empty_strided((1, 64, 1, 128), (0, 2**39, 128, 1), dtype=BF16, device="meta"))


def test_head_major_and_expanded_inputs():
    """What a tensor map cannot show is copied."""
    call = inputs([65, 65, 65], 2, batched=True)
    for name in ("q", "v"):
        call[name] = call[name].transpose(1, 2).contiguous().transpose(1, 2)
    call["k"] = call["k"][:1].expand_as(call["k"])
    call["g"] = call["g"][:, :, :1].expand_as(call["g"])
    assert [name for name in "qkvg" if sm90.tokens(call[name])] == ["k"]
    check(call, out=torch.full_like(call["v"], NAN).transpose(1, 2).contiguous().transpose(1, 2))


def test_equal_rows_of_one_key():
    """A stride of zero from token to token."""
    call = inputs([70])
    check(call, q=call["q"][:, :1].expand_as(call["q"]), k=call["k"][:, :1].expand_as(call["k"]), correlated=True)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("lengths", [[70, 5], [64]], ids=str)
def test_the_output_may_be_v(lengths: list[int], offset: int):
    call = inputs(lengths, 2)
    want, kept = TARGET.run("chunk_kda", {**call, "initial_state": call["initial_state"].clone()}), call["initial_state"].clone()
    call["v"] = elsewhere(call["v"], 0, offset)
    o = TARGET.run("chunk_kda", {**call, "initial_state": kept, "out": call["v"]})
    assert o is call["v"]
    assert_same_bits(o, want, "output")


@pytest.mark.parametrize("pool", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize(("gap", "offset"), [(8, 8), (24, 1), (3, 0)])
def test_pools_with_gaps(gap: int, offset: int, pool: torch.dtype):
    call = track_all(inputs([70, 65], 2, pool_dtype=pool), [1, 0])
    call["initial_state"] = elsewhere(call["initial_state"], gap, offset)
    whole = call["initial_state"].as_strided((call["initial_state"].untyped_storage().nbytes() // pool.itemsize,), (1,), 0)
    there = torch.zeros_like(whole, dtype=torch.bool)
    there.as_strided(call["initial_state"].shape, call["initial_state"].stride(), offset).fill_(True)
    check(call)
    assert bool(whole[~there].isnan().all())


# Hostile numbers


def decaying(lengths: list[int], decay: Callable[[Tensor], Tensor], **options: Any) -> Call:
    call = inputs(lengths, gate="none", **options)
    return call | {"g": decay(torch.zeros_like(call["g"])), "output_intermediate_states": True}


@pytest.mark.parametrize("decay", [0.0, -1e-3, -5.0, -50.0, -1000.0])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_one_decay_everywhere(decay: float, dtype: torch.dtype):
    check(decaying([130, 70], lambda g: g + decay, dtype=dtype))


@pytest.mark.parametrize("strong", [-5.0, -6.0, -50.0])
@pytest.mark.parametrize("channels", [1, 8, 9, 70])
def test_wide_chunks_beside_others(strong: float, channels: int):
    """One head, some channels, some chunks of one sequence: -5 is not wide yet."""

    def decay(g: Tensor) -> Tensor:
        g -= 1e-2
        g[:, 60:170, 1, 5 : 5 + channels] = strong
        g[:, 230:, 0, 100] = strong
        return g

    check(decaying([130, 70, 64], decay, heads=2))


def test_wide_chunks_give_the_same_bits_beside_others():
    """How a chunk is computed follows from its own numbers."""
    results = []
    for others in (-1e-2, -50.0):

        def decay(g: Tensor, others: float = others) -> Tensor:
            g[:, :130] = others
            g[:, 130:, :, 5:9] = -20.0
            return g

        call = decaying([130, 70], decay)
        results.append((TARGET.run("chunk_kda", call)[0][:, 130:], call["initial_state"][call["initial_state_indices"].long()[1]]))
    for got, want, name in zip(*results, ("output", "state"), strict=True):
        assert_same_bits(got, want, name)


def test_strong_decay_at_one_token():
    for token in (0, 15, 16, 31, 32, 63):

        def decay(g: Tensor, token: int = token) -> Tensor:
            g -= 1e-3
            g[:, token] = -50.0
            return g

        check(decaying([70], decay))


@pytest.mark.parametrize("lower_bound", [-5.0, -20.0, None])
def test_extreme_logits(lower_bound: float | None):
    call = inputs([130, 70], 2, beta_is_raw=True)
    levels, g = torch.tensor([-1e4, -90.0, -12.0, 0.0, 12.0, 90.0, 1e4], dtype=BF16), torch.Generator().manual_seed(0)
    for name in ("g", "beta"):
        call[name] = levels[torch.randint(len(levels), call[name].shape, generator=g)].to(DEVICE)
    check(call, lower_bound=lower_bound, output_intermediate_states=True)


@pytest.mark.parametrize("lower_bound", [-5.0, -20.0])
@pytest.mark.parametrize("period", [1, 2, 40])
def test_keys_that_come_back(period: int, lower_bound: float):
    call = inputs([150, 5, 70])
    call |= {"k": call["k"][:, torch.arange(225, device=DEVICE) % period], "g": torch.full_like(call["g"], -6.0), "lower_bound": lower_bound}
    check(call, correlated=True, output_intermediate_states=True)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_one_row_repeated(dtype: torch.dtype):
    """The same query, key and gate at every token, which hardly forgets; 16 values in turn."""
    call = inputs([512], dtype=dtype, beta_is_raw=True)
    call |= {name: call[name][:, :1].expand_as(call[name]) for name in "qk"}
    call |= {name: torch.zeros_like(call[name]) for name in ("A_log", "dt_bias", "initial_state")}
    call |= {"v": call["v"][:, torch.arange(512, device=DEVICE) % 16]}
    call |= {"g": torch.full_like(call["g"], -12.0), "beta": torch.full_like(call["beta"], 8.0)}
    check(call, correlated=True, output_intermediate_states=True)


def test_nan_stays_in_its_sequence():
    clean, poisoned = inputs([70, 60, 70]), inputs([70, 60, 70])
    for name in DATA:
        poisoned[name][:, 70:130] = NAN
    want, o = (TARGET.run("chunk_kda", call) for call in (clean, poisoned))
    others = clean["initial_state_indices"][[0, 2]].long()
    for tokens in (slice(0, 70), slice(130, 200)):
        assert_same_bits(o[:, tokens], want[:, tokens], "output of the other sequences")
    assert_same_bits(poisoned["initial_state"][others], clean["initial_state"][others], "their states")


def test_nothing_is_copied_between_the_two_kernels(monkeypatch: pytest.MonkeyPatch):
    """The chain waits for `prepare` alone, and reads indices before it does."""
    call = inputs([70, 65], 2)
    for name in ("initial_state_indices", "cu_seqlens"):
        call[name] = torch.stack([call[name], call[name]], 1)[:, 0]
        assert not call[name].is_contiguous()
    events, dense, launches = [], sm90.dense, sm90.Launches
    monkeypatch.setattr(sm90, "dense", lambda x: (events.append("copy"), dense(x))[1])

    def noted(name: str, start: Callable[..., None]) -> Callable[..., None]:
        return lambda *args: (events.append(name), start(*args))[1]

    class Noted(launches):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            events.clear()
            for name in ("_prepare", "_chain"):
                setattr(self, name, noted(name, getattr(self, name)))

    monkeypatch.setattr(sm90, "Launches", Noted)
    check(call)
    assert events[-2:] == ["_prepare", "_chain"]
    assert events[:-2] == ["copy"] * (len(events) - 2)

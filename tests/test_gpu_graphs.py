"""Calls in a CUDA graph, replayed with other lengths, slots and data; no call waits for the GPU (S16)."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch

import oracle
from conftest import Call, Target
from gpu import DATA, captured, decay_in_places, no_syncs, results, snapshots
from helpers import DECODE, NAN
from kdaserve import ContractError, Snapshots, plan_prefill
from kdaserve.testing import assert_same_bits, decode_inputs, prefill_inputs
from test_pool_semantics import cloned, with_tail

pytestmark = pytest.mark.gpu

ROWS, SEQUENCES, SLOTS, SAVED = 512, 6, 24, 5
SIZES: dict[str, Any] = {"heads": 2, "v_heads": 4, "k_dim": 64, "v_dim": 64, "dtype": torch.bfloat16}
STEPS = (
    [200, 70, 0, 128, 5, 109],  # no padding row
    [0, 0, 300, 1, 64, 0],
    [0] * SEQUENCES,
    [1] * SEQUENCES,
    [ROWS, 0, 0, 0, 0, 0],
    [0, 0, 0, 0, 0, ROWS],
    [63, 64, 65, 0, 130, 7],
    [0, 2, 0, 0, 3, 1],
)


def step(lengths: list[int], gate: str, device: str, seed: int) -> Call:
    """A prefill step in a bucket of fixed capacity; NaN wherever nothing may be read."""
    draw = random.Random(seed)
    call = prefill_inputs(lengths, gate=gate, beta_is_raw=True, slots=SLOTS, seed=seed, device=device, **SIZES)
    if seed % 2:
        call["g"] = decay_in_places(call["g"], gate)
    for name in DATA:
        call[name] = with_tail(call[name], ROWS - sum(lengths))
    slots = call["initial_state_indices"].tolist()
    free = [slot for slot in range(SLOTS) if slot not in slots]
    call["initial_state"][free] = NAN
    for n in draw.sample(range(SEQUENCES), seed % 3):
        call["initial_state_indices"][n] = draw.choice([-1, -7])
    saved = [(n, t) for n, length in enumerate(lengths) for t in {*range(0, length + 1, 64), length}]
    saved = draw.sample(saved, draw.randint(0, SAVED))
    entries = [(*entry, slot) for entry, slot in zip(saved, draw.sample(free, len(saved)), strict=True)]
    entries += [(draw.randrange(SEQUENCES), 12345, -1)] * (SAVED - len(entries))
    call["snapshots"] = snapshots(draw.sample(entries, SAVED), device)
    chunks = [draw.randint(-1, (length - 1) // 64) if length else -1 for length in lengths]
    call["track_chunk_idx"] = torch.tensor(chunks, dtype=torch.int32, device=device)
    call["track_state"] = torch.full((SEQUENCES, *call["initial_state"].shape[1:]), NAN, device=device)
    return call


@pytest.mark.parametrize("gate", ["bounded", "softplus", "none"])
def test_replays_of_a_prefill_of_other_lengths(serving_target: Target, op: str, gate: str):
    """Captured with the weakest step there is; the last steps of a graph see what all before them left behind."""
    graph = captured(serving_target, op, step(STEPS[2], gate, serving_target.device, seed=0))
    for seed, lengths in enumerate(STEPS):
        call = step(lengths, gate, serving_target.device, seed)
        eager = cloned(call)
        o = graph.check_prefill(op, call)
        plain = serving_target.run(op, eager)
        assert_same_bits(o, plain, f"{op}: output of {lengths} replayed")
        for name in ("initial_state", "track_state"):
            assert_same_bits(call[name], eager[name], f"{op}: {name} of {lengths} replayed")


def test_replays_of_a_prefill_into_a_given_out(serving_target: Target, op: str):
    def call(seed: int) -> Call:
        made = step(STEPS[seed], "bounded", serving_target.device, seed)
        return made | {"out": torch.full_like(made["v"], NAN)}

    graph = captured(serving_target, op, call(0))
    for seed in (6, 1, 2):
        again = call(seed)
        graph.check_prefill(op, again)
        assert_same_bits(again["out"], serving_target.run(op, call(seed)), "output replayed into `out`")


def test_replays_of_a_plan_with_h(serving_target: Target, op: str):
    """The lengths are the plan's; slots and data change."""
    lengths = [130, 0, 64, 7]
    plan = plan_prefill(lengths=lengths, device=serving_target.device)

    def call(seed: int) -> Call:
        made = prefill_inputs(lengths, slots=9, seed=seed, device=serving_target.device, **SIZES)
        made["initial_state_indices"][seed % 4] = -1
        return made | {"plan": plan, "cu_seqlens": None, "output_intermediate_states": True}

    graph = captured(serving_target, op, call(0))
    for seed in range(1, 5):
        o, h = graph.check_prefill(op, call(seed))
        eager = results(serving_target, op, call(seed))
        assert_same_bits(o, eager["output"], "output replayed")
        assert_same_bits(h, eager["h"], "h replayed")


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_replays_of_a_decode_of_other_requests(serving_target: Target, lower_bound: float | None):
    def call(seed: int) -> Call:
        made = decode_inputs(9, lower_bound=lower_bound, slots=SLOTS, seed=seed, device=serving_target.device, **SIZES)
        free = [slot for slot in range(SLOTS) if slot not in made["ssm_state_indices"].tolist()]
        made["initial_state"][free] = NAN
        padding = random.Random(seed).sample(range(9), 2 * seed % 10)
        made["ssm_state_indices"][padding] = -1 - seed
        for name in ("mixed_qkv", "a", "b"):
            made[name][padding] = NAN
        return made

    graph = captured(serving_target, DECODE, call(0))
    for seed in range(1, 7):
        again, eager = call(seed), call(seed)
        out = graph.check_decode(again)
        serving_target.run(DECODE, eager)
        assert_same_bits(out, eager["out"], f"decode output of step {seed} replayed")
        assert_same_bits(again["initial_state"], eager["initial_state"], f"pool after step {seed} replayed")


def test_a_graph_of_prefill_and_decode_steps(serving_target: Target):
    """A prompt and 20 tokens after it in one graph, the state carried in the pool, as one longer prefill has it."""
    device, lengths, tokens = serving_target.device, [70, 0, 5], 20
    heads: dict[str, Any] = {"heads": 2, "k_dim": 64, "v_dim": 64, "beta_is_raw": True, "slots": 5}
    whole = prefill_inputs([length + tokens for length in lengths], device=device, **heads)
    ends = [0, *whole["cu_seqlens"].tolist()[1:]]
    prompt = dict(whole)
    for name in DATA:
        prompt[name] = torch.cat([whole[name][:, a : b - tokens] for a, b in pairwise(ends)], 1)
    prompt["cu_seqlens"] = torch.tensor([0, 70, 70, 75], dtype=torch.int32, device=device)
    rows = torch.tensor([[b - tokens + i for b in ends[1:]] for i in range(tokens)], device=device)
    steps = [
        {
            "mixed_qkv": torch.cat([whole[name][0, row].flatten(1) for name in ("q", "k", "v")], 1),
            "a": whole["g"][0, row].flatten(1),
            "b": whole["beta"][0, row],
            "out": torch.full_like(whole["v"][0, row][:, None], NAN),
            "ssm_state_indices": whole["initial_state_indices"],
            "scale": None,
            **{name: whole[name] for name in ("A_log", "dt_bias", "lower_bound", "use_qk_l2norm_in_kernel", "initial_state")},
        }
        for row in rows
    ]
    start = whole["initial_state"].clone()
    expected = oracle.prefill(whole)

    def run() -> torch.Tensor:
        o = serving_target.run("chunk_kda", prompt)
        for one in steps:
            serving_target.with_op(DECODE).run(DECODE, one)
        return o

    for _ in range(2):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = run()
    for _ in range(2):
        whole["initial_state"].copy_(start)
        o.fill_(NAN)
        graph.replay()
        for n, end in enumerate(ends[1:]):
            wanted = expected.o[0, end - tokens : end]
            serving_target.assert_close(torch.cat([one["out"][n] for one in steps]), wanted, f"decode after the prompt of sequence {n}")
            slot = int(whole["initial_state_indices"][n])
            serving_target.assert_close(whole["initial_state"][slot], expected.states[n][lengths[n] + tokens], f"state of sequence {n}")
        serving_target.assert_close(o[0, :70], expected.o[0, :70], "output of the first prompt")


# Nothing waits


def test_snapshots_on_the_host_are_not_captured(serving_target: Target, op: str):
    """The graph would keep a copy of the lists, which follows no later list, and whose memory is given away when the list changes."""
    call = prefill_inputs([70], slots=2, device=serving_target.device, **SIZES)
    call["snapshots"] = Snapshots([0], [64], [1])
    with pytest.warns(UserWarning, match="Graph is empty"), pytest.raises(ContractError, match=r"KDA107.*`snapshots.sequence` is on cpu"):
        captured(serving_target, op, call)
    serving_target.run(op, call)  # and nothing is left of the attempt


def test_no_sync_is_seen_when_there_is_one(serving_target: Target):
    one = torch.ones(1, device=serving_target.device)
    with no_syncs(), pytest.raises(RuntimeError, match="synchronizing"):
        one.item()


@pytest.mark.parametrize("given", ["cu_seqlens", "plan", "plan with h", "batched"])
def test_a_prefill_does_not_wait(serving_target: Target, op: str, given: str):
    """Neither a call like earlier ones nor the first of its lengths."""
    calls = []
    for seed, lengths in enumerate((STEPS[0], [3, 0, 1, 0, 66, 0])):
        call = step(lengths, "softplus", serving_target.device, seed)
        if given == "batched":
            call = prefill_inputs([70 + seed] * 3, batched=True, device=serving_target.device, **SIZES)
        elif given != "cu_seqlens":
            call["plan"] = plan_prefill(lengths=lengths, device=serving_target.device)
            call["output_intermediate_states"] = given == "plan with h"
        if given != "cu_seqlens":
            call["cu_seqlens"] = None
        calls.append(call)
    serving_target.run(op, calls[0])
    with no_syncs():
        for call in calls:
            serving_target.run(op, call)


def test_a_decode_does_not_wait(serving_target: Target):
    calls = [decode_inputs(batch, device=serving_target.device, **SIZES) for batch in (3, 5)]
    serving_target.run(DECODE, calls[0])
    with no_syncs():
        for call in calls:
            serving_target.run(DECODE, call)

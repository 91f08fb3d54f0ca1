"""The chain for Hopper, run on the CPU: values, barriers, and what it must not touch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import gluon_on_cpu
from gluon_machine import DeadlockError
from kdaserve.testing import assert_close, assert_same_bits

NAN = float("nan")
BF16 = torch.bfloat16
chain, launch = gluon_on_cpu.load_modules("kdaserve.ops.chunk_kda.sm90", "chain", "launch")
C, D = 64, 128


def tiles(lengths: list[int]) -> tuple[Tensor, ...]:
    """kd, qd, ke, q.k, M beta and the decay of chunks with so many tokens, by the formulas, in bf16 but the last."""
    g = torch.Generator().manual_seed(0)
    n = len(lengths)
    valid = (torch.arange(C) < torch.tensor(lengths)[:, None]).float()[..., None]
    k = torch.nn.functional.normalize(torch.randn(n, C, D, generator=g), dim=-1) * valid
    q = torch.nn.functional.normalize(torch.randn(n, C, D, generator=g), dim=-1) * valid
    G = (-0.05 * torch.rand(n, C, D, generator=g) * valid).cumsum(1)  # E5
    beta = torch.rand(n, C, 1, generator=g) * valid
    kd, qd, ki = k * G.exp(), q * G.exp(), k * (-G).exp()
    A = (beta * (kd @ ki.mT)).tril(-1)  # E6
    M = torch.linalg.inv(A.double() + torch.eye(C)).float() * beta.mT  # E7
    return (*(x.to(BF16) for x in (kd, qd, k * (G[:, -1:] - G).exp(), (qd @ ki.mT).tril(), M.tril())), G[:, -1].exp())


@dataclasses.dataclass
class Problem:
    """A call of the chain; records that no chunk owns are NaN, and so is the output before."""

    lengths: list[int]
    HV: int
    tensors: dict[str, Any]
    owned: list[tuple[int, int, int]]
    """Sequence, chunk and record of head 0, of every chunk."""

    def run(self, **options: Any) -> None:
        t = self.tensors
        arguments = t["records"], t["decays"], t["v"], t["o"], t["pool"], t["cu_seqlens"], t["others"]
        made = launch.chain(*arguments, t["order"], **options)
        made(launch.chain_tensors(*arguments, t["order"]), 0 if t["others"][5] is None else len(t["others"][5]))

    def start(self, n: int) -> int:
        return sum(self.lengths[:n])

    def copy(self) -> Problem:
        def cloned(x: Any) -> Any:
            return [*map(cloned, x)] if isinstance(x, list) else x.clone() if isinstance(x, Tensor) else x

        return dataclasses.replace(self, tensors={name: cloned(x) for name, x in self.tensors.items()})


def problem(lengths: list[int], HV: int = 2, *, batched: bool = False, dtype: torch.dtype = BF16, pool: torch.dtype = torch.float32) -> Problem:
    N, T = len(lengths), sum(lengths)
    g = torch.Generator().manual_seed(1)
    per = -(-lengths[0] // C)
    firsts = [n * per if batched else sum(lengths[:n]) // C + n for n in range(N)]
    owned = [(n, c, (firsts[n] + c) * HV) for n in range(N) for c in range(-(-lengths[n] // C))]
    records = (N * per if batched else T // C + N) * HV
    packed, decays = torch.full((records, 256, D), NAN, dtype=BF16), torch.full((records, D), NAN)
    at = [r + h for _, _, r in owned for h in range(HV)]
    kd, qd, ke, qk, M, decay = tiles([min(C, lengths[n] - c * C) for n, c, _ in owned for _ in range(HV)])
    packed[at], decays[at] = torch.cat([kd, qd, ke, torch.cat([qk, M], -1)], 1), decay
    shape = (N, lengths[0], HV) if batched else (1, T, HV)
    tensors = {
        "records": packed.view(-1, D), "decays": decays,
        "v": torch.randn(*shape, D, generator=g).to(dtype), "o": torch.full((*shape, D), NAN, dtype=dtype),
        "pool": (0.3 * torch.randn(N + 3, HV, D, D, generator=g)).to(pool),
        "cu_seqlens": None if batched else torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32), "order": None,
        "others": [torch.randperm(N + 3, generator=g)[:N].int(), *[None] * 7],
    }  # fmt: skip
    return Problem(lengths, HV, tensors, owned)


def expected(p: Problem) -> tuple[Tensor, list[list[Tensor]]]:
    """Output `[tokens, HV, V]` and, of each sequence, the states `[HV, V, K]` at its boundaries, in float64."""
    t, HV = p.tensors, p.HV
    v = t["v"].reshape(-1, HV, D).double()
    o = torch.zeros_like(v)
    slots = t["others"][0].tolist()
    states = [[t["pool"][slot].double() if slot >= 0 else torch.zeros(HV, D, D).double()] for slot in slots]
    for n, c, record in p.owned:
        S = states[n][-1]
        rows = t["records"].view(-1, 256, D)[record : record + HV].double()
        kd, qd, ke = rows[:, :192].split(C, 1)
        qk, M = rows[:, 192:].split(C, 2)
        tokens = slice(p.start(n) + c * C, min(p.start(n) + (c + 1) * C, p.start(n) + p.lengths[n]))
        r = torch.zeros(HV, C, D).double()
        r[:, : tokens.stop - tokens.start] = v[tokens].transpose(0, 1)
        new = M @ (r - kd @ S.mT)  # E9
        o[tokens] = (qd @ S.mT + qk @ new).transpose(0, 1)[: tokens.stop - tokens.start]  # E10
        states[n].append(S * t["decays"][record : record + HV, None].double() + new.mT @ ke)  # E11
    return o, states


def check(p: Problem, *, within: float = 4e-3, **options: Any) -> None:
    """Output and states, and that nothing else of the pool changes."""
    o, states = expected(p)
    t = p.tensors
    before, slots = t["pool"].clone(), t["others"][0].tolist()
    p.run(**options)
    assert_close(t["o"].reshape(-1, p.HV, D).double(), o, within, "output")
    for n, slot in enumerate(slots):
        if slot >= 0 and p.lengths[n]:
            assert_close(t["pool"][slot].double(), states[n][-1], within, f"state of sequence {n}")
    written = {slot for n, slot in enumerate(slots) if p.lengths[n]}
    named = {int(slot) for slot in t["others"][7]} if t["others"][7] is not None else set()
    others = [slot for slot in range(len(before)) if slot not in written | named]
    assert_same_bits(t["pool"][others], before[others], "slots that no sequence names")


LENGTHS = [0, 1, 63, 0, 64, 65, 200, 0]


@pytest.mark.parametrize("eager", [False, True])
def test_sequences_of_all_lengths(eager: bool):
    with gluon_on_cpu.eager(eager):
        check(problem(LENGTHS))


@pytest.mark.parametrize("eager", [False, True])
def test_a_long_sequence_goes_round_the_stages(eager: bool):
    with gluon_on_cpu.eager(eager):
        check(problem([10 * C + 5], 1))


def test_starting_before_prepare_ends_changes_no_bit():
    p = problem([130, 64])
    q = p.copy()
    p.run()
    q.run(overlapping=False)
    assert_same_bits(q.tensors["o"], p.tensors["o"], "output")
    assert_same_bits(q.tensors["pool"], p.tensors["pool"], "pool")


def test_a_negative_slot_starts_from_zero_and_is_not_written():
    p = problem([70, 40, 64])
    p.tensors["others"][0][1] = -1
    check(p)


def test_a_batch():
    check(problem([130, 130, 130], batched=True))


def test_order_changes_no_bit():
    p = problem(LENGTHS)
    q = p.copy()
    q.tensors["order"] = torch.tensor(sorted(range(len(LENGTHS)), key=lambda n: -LENGTHS[n]), dtype=torch.int32)
    p.run()
    check(q)
    assert_same_bits(q.tensors["o"], p.tensors["o"], "output")
    assert_same_bits(q.tensors["pool"], p.tensors["pool"], "pool")


@pytest.mark.parametrize("pool", [torch.bfloat16, torch.float16])
def test_pools_in_16_bits(pool: torch.dtype):
    check(problem([130, 30], pool=pool))


def test_fp16_and_64_bit_indices():
    p = problem([130, 30], dtype=torch.float16)
    p.tensors["others"][0] = p.tensors["others"][0].long()
    p.tensors["cu_seqlens"] = p.tensors["cu_seqlens"].long()
    check(p)


@pytest.mark.parametrize("batched", [False, True])
def test_views_of_larger_tensors(batched: bool):
    """Heads and slots apart, rows between; NaN around, which must neither come in nor be written over."""
    p = problem([100, 100], batched=batched)
    t = p.tensors
    B, T = t["v"].shape[:2]
    v, o = (torch.full((B, T + 3, p.HV + 2, 160), NAN, dtype=BF16) for _ in range(2))
    for name, whole in (("v", v), ("o", o)):
        view = whole[:, :T, 1 : 1 + p.HV, 8:136]
        t[name] = view.copy_(t[name])
    pool = torch.full((len(t["pool"]), p.HV * D * D + 24), NAN)
    t["pool"] = pool[:, 8:-16].view(t["pool"].shape).copy_(t["pool"])
    check(p)
    inside = torch.zeros(o.shape, dtype=torch.bool)
    inside[:, :T, 1 : 1 + p.HV, 8:136] = True
    assert bool(o[~inside].isnan().all())
    assert bool(pool[:, :8].isnan().all())
    assert bool(pool[:, -16:].isnan().all())


def test_slots_at_odd_strides():
    p = problem([100])
    pool = torch.full((4, p.HV * D * D + 1), NAN)
    p.tensors["pool"] = pool[:, 1:].view(4, p.HV, D, D).copy_(p.tensors["pool"])
    check(p)


def test_the_output_may_be_v_itself():
    p = problem([200, 70])
    q = p.copy()
    q.tensors["o"] = q.tensors["v"]
    p.run()
    q.run()
    assert_same_bits(q.tensors["o"], p.tensors["o"], "output")


def test_nan_stays_in_its_sequence():
    p = problem([100, 70, 90])
    q = p.copy()
    q.tensors["v"][:, 100:170] = NAN
    p.run()
    q.run()
    for name, tokens in (("before", slice(0, 100)), ("behind", slice(170, 260))):
        assert_same_bits(q.tensors["o"][:, tokens], p.tensors["o"][:, tokens], name)
    slots = q.tensors["others"][0][[0, 2]].long()
    assert_same_bits(q.tensors["pool"][slots], p.tensors["pool"][slots], "states")


def test_states_at_boundaries():
    """h, tracked states and snapshots, several at a boundary and at both ends of a sequence."""
    lengths = [200, 64, 30, 0, 300]
    p = problem(lengths)
    N, chunks = len(lengths), [-(-n // C) for n in lengths]
    offsets = torch.tensor([0, *chunks]).cumsum(0)[:-1].int()
    p.tensors["pool"] = torch.randn(N + 20, p.HV, D, D) * 0.3
    p.tensors["others"][0] = torch.arange(N).int()
    h, track = torch.full((sum(chunks), p.HV, D, D), NAN, dtype=BF16), torch.full((N, p.HV, D, D), 7.0)
    wanted = [(0, 64, 10), (0, 200, 11), (1, 64, 12), (3, 0, 13), (4, 0, 14), (4, 256, 15), (4, 256, 16), (4, 300, -1), (2, 30, 17), (4, 192, 18)]
    snapshots = [torch.tensor(x).int() for x in zip(*wanted, strict=True)]
    p.tensors["others"][1:] = [h, offsets, track, torch.tensor([2, 0, -1, -1, 4]).int(), *snapshots]
    _, states = expected(p)
    check(p)
    for n in range(N):
        for c in range(chunks[n]):
            assert_close(h[offsets[n] + c].double(), states[n][c], 4e-3, f"h, sequence {n}, chunk {c}")
    for n, c in ((0, 2), (1, 0), (4, 4)):
        assert_close(track[n].double(), states[n][c], 4e-3, f"tracked, sequence {n}")
    assert bool((track[2:4] == 7).all())
    for n, tokens, slot in wanted:
        if slot >= 0:
            assert_close(p.tensors["pool"][slot].double(), states[n][-(-tokens // C)], 4e-3, f"snapshot {slot}")


def test_what_a_tensor_map_cannot_show_is_refused():
    x = torch.zeros(2, 5, 3, 128, dtype=BF16)
    assert launch.tokens(x) == launch.Matrix(10, 384, 384, (64, 64), launch.TILE.value)
    assert launch.tokens(x[:, :1, :1]) == launch.Matrix(2, 128, 1920, (64, 64), launch.TILE.value)
    between = torch.zeros(2, 5, 3, 132, dtype=BF16)[..., :128]
    for bad in (x.float(), x.transpose(1, 2), x.transpose(2, 3), between, x[:, :0], x[:, :1].expand(2, 5, 3, 128)):
        assert launch.tokens(bad) is None


def test_a_missing_arrival_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gluon_on_cpu.HOPPER["mbarrier"], "arrive", lambda *args, **kwargs: None)
    with pytest.raises(DeadlockError, match="produce waits for phase"):
        problem([4 * C], 1).run()


def test_a_wrong_phase_is_found(monkeypatch: pytest.MonkeyPatch):
    wait = gluon_on_cpu.barrier_wait
    monkeypatch.setattr(gluon_on_cpu.HOPPER["mbarrier"], "wait", lambda bar, phase: wait(bar, int(phase) ^ 1))
    p = problem([4 * C], 1)
    with pytest.raises((DeadlockError, AssertionError)):
        check(p)


def test_a_wrong_number_of_bytes_is_found(monkeypatch: pytest.MonkeyPatch):
    expect = gluon_on_cpu.barrier_expect
    monkeypatch.setattr(gluon_on_cpu.HOPPER["mbarrier"], "expect", lambda bar, size: expect(bar, size + 16))
    with pytest.raises(DeadlockError, match="default waits for phase 0"):
        problem([C], 1).run()


def test_a_missing_fence_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chain, "fence_async_shared", lambda: None)
    with pytest.raises(AssertionError, match="barrier behind a fence"):
        problem([C], 1).run()

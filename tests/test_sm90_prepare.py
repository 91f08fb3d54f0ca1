"""The records of the Hopper prepare kernel, run on the CPU, against the formulas in float64."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import gluon_on_cpu
from kdaserve.testing import assert_close, assert_same_bits

SCALE, LOWER_BOUND = 128**-0.5, -5.0
BF16, FP16, NAN = torch.bfloat16, torch.float16, float("nan")
launch, prepare, levels, pairs = gluon_on_cpu.load_modules("kdaserve.ops.chunk_kda.sm90", "launch", "prepare", "levels", "pairs")
Call = dict[str, Any]


def inputs(
    lengths: list[int], heads: int = 1, kind: str = "random", v_heads: int = 0, padding: int = 0, dtype: torch.dtype = BF16, batch: int = 1
) -> Call:
    """Bounded gate with parameters, raw beta; `kind` makes them hostile, or with "of" so many channels. With a batch all lengths are the one."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    HV, T = v_heads or heads, sum(lengths) + padding
    q, k, g, beta = normal(batch, T, heads, 128), normal(batch, T, heads, 128), normal(batch, T, HV, 128), normal(batch, T, HV)
    kind, _, channels = kind.partition(" of ")
    name, _, number = kind.partition(" ")
    if name == "period":
        k = k[:, torch.arange(T) % int(number)]
        g.fill_(-6.0)
    if name == "one":
        k = k[:, :1].expand_as(k)
        q = k
        g.fill_(-12.0)
        beta.fill_(8.0)
    if name == "cosine":
        common, own = torch.nn.functional.normalize(k[:, :1], dim=-1), torch.nn.functional.normalize(k, dim=-1)
        k = math.sqrt(float(number)) * common + math.sqrt(1 - float(number)) * own
        g.fill_(-8.0)
        beta.fill_(3.0)
    if name == "strong":
        g.fill_(20.0)
    if name == "weak":
        g.fill_(-20.0)
    if name == "mixed":
        g = torch.where(normal(*g.shape) > 0, 20.0, -20.0)
    if name == "steps":
        g = torch.where((torch.arange(T) // 16 % 2 == 1)[None, :, None, None], 20.0, -20.0).expand_as(g)
    if name == "times":
        g = float(number) * g
    if name == "rare":
        g = torch.where(torch.rand(g.shape, generator=generator) < float(number), 1e6, 0.0)
    if name == "once":
        g = torch.where(torch.arange(128) % 64 == torch.arange(T)[:, None, None] % 64, float(number), 1e-3).expand_as(g)
    if name == "beside":
        g = torch.where(torch.arange(T)[:, None, None] % 64 == 20, 1e6, float(number) * (1 + torch.rand(g.shape, generator=generator)))
        q, k = (torch.where(torch.arange(128) % 16 == 0, t, 0.02 * t) for t in (q, k))
    if name == "small":
        k, q = 1e-3 * k, 1e-3 * q
    if name == "recurring":
        k = k[:, torch.arange(T) % int(number)]
        k[..., 5] *= 0.1
        g = torch.where(torch.arange(128) == 5, 50.0, 1e-3).expand_as(g)
    if channels:
        g = torch.where(torch.arange(128) % (128 // int(channels)) == 0, g, 1e-3)
    x = {"q": q.to(dtype).contiguous(), "k": k.to(dtype).contiguous(), "g": g.to(dtype).contiguous(), "beta": beta.to(dtype)}
    x |= {"A_log": torch.rand(HV, generator=generator) if name != "one" else torch.zeros(HV), "dt_bias": torch.rand(HV * 128, generator=generator)}
    if name == "A":
        x["A_log"].fill_(math.log(float(number)))
        x["g"] = (3 * x["g"]).contiguous()
    if name == "one":
        x["dt_bias"].zero_()
    x["cu"] = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    if padding:
        for name in ("q", "k", "g", "beta"):
            x[name][:, sum(lengths) :] = NAN
    return x


def normed(x: Tensor, l2norm: bool) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() if l2norm else x


def exact(x: Call, b: int, first: int, end: int, h: int, options: Call) -> dict[str, Tensor]:
    """The record of tokens first to end of a head, in float64."""
    HV, H = x["g"].shape[2], x["q"].shape[2]
    L = end - first

    def part(name: str, head: int) -> Tensor:
        return x[name][b, first:end, head].double()

    def padded(t: Tensor) -> Tensor:
        return torch.cat([t, t.new_zeros(64 - L, *t.shape[1:])])

    k = padded(normed(part("k", h // (HV // H)), options["l2norm"]))
    q = padded(normed(part("q", h // (HV // H)), options["l2norm"])) * SCALE
    logit = part("g", h)
    if x["dt_bias"] is not None:
        logit = logit + x["dt_bias"].double().view(HV, 128)[h]
    a = x["A_log"].double()[h].exp()
    gates = {
        "bounded": lambda: LOWER_BOUND * torch.sigmoid(a * logit),
        "softplus": lambda: -a * torch.nn.functional.softplus(logit),
        "none": lambda: logit,
    }
    G = padded(gates[options["gate"]]()).cumsum(0)
    beta = padded(part("beta", h).sigmoid() if options["beta_is_raw"] else part("beta", h))
    D = torch.exp((G[:, None] - G[None]).masked_fill(torch.ones(64, 64).triu(1)[..., None] > 0, -torch.inf))
    A = torch.einsum("id,ijd,jd->ij", k, D, k)
    qk, ke = torch.einsum("id,ijd,jd->ij", q, D, k).tril(), k * (G[-1] - G).exp()
    N = torch.zeros(64, 64, dtype=torch.float64)
    near = A.tril(-1) > 0.95 * (1.0 if options["l2norm"] else A.diagonal()[:, None])
    for i in range(64):
        if near[i].any():
            N[i, near[i].nonzero().max()] = 1
    if int(near.any(1).sum()) * 8 < L:
        N.zero_()
    eye = torch.eye(64, dtype=torch.float64)
    M = torch.linalg.inv((eye + A.tril(-1) * beta[:, None]) @ (eye - N)) * beta[None]
    return {
        "kd": k * G.exp(),
        "qd": q * G.exp(),
        "ke": (eye - N).T @ ke,
        "qk": qk @ (eye - N),
        "M": M,
        "decay": G[-1].exp(),
        "N": N,
        "plain ke": ke,
        "plain qk": qk,
    }


def record(tiles: Tensor, decay: Tensor, r: int) -> dict[str, Tensor]:
    t = tiles[r * 256 : (r + 1) * 256].double()
    return {"kd": t[:64], "qd": t[64:128], "ke": t[128:192], "qk": t[192:, :64], "M": t[192:, 64:], "decay": decay[r].double()}


def difference(got: Tensor, want: Tensor, floor: float) -> float:
    """Norm of the difference by the norm of what is wanted, or by `floor` where that is smaller."""
    return ((got - want).norm() / want.norm().clamp_min(max(floor, 1e-300))).item() if got.isfinite().all() else math.inf


def records(
    x: Call, *, gate: str = "bounded", l2norm: bool = True, beta_is_raw: bool = True, wide: bool = False, packed: bool = True
) -> tuple[Tensor, ...]:
    """Tiles, decay, output and order as the kernel leaves them; what it does not write is NaN, 7 or -1."""
    B, T, HV, _ = x["g"].shape
    N = len(x["cu"]) - 1 if packed else B
    units = T // 64 + N if packed else B * -(-T // 64)
    tiles, decay = torch.full((units * HV * 256, 128), NAN, dtype=BF16), torch.full((units * HV, 128), NAN)
    o, order = torch.full((B, T, HV, 128), 7.0, dtype=x["q"].dtype), torch.full((N,), -1, dtype=torch.int32)
    inputs, parameters = [x[name] for name in ("q", "k", "g", "beta")], (None, None) if gate == "none" else (x["A_log"], x["dt_bias"])
    pointers = [*inputs, *parameters, *((x["cu"], o) if packed else (None, None)), decay, tiles]
    start = launch.prepare(
        pointers, order if packed else None, units * HV, N,
        GATE=gate, L2NORM=l2norm, BETA_RAW=beta_is_raw, WIDE=gate != "bounded" or wide,
    )  # fmt: skip
    start(launch.prepare_tensors(pointers, order if packed else None), SCALE, LOWER_BOUND)
    return tiles, decay, o, order


def check(
    lengths: list[int], heads: int = 1, kind: str = "random", *, batch: int = 1, v_heads: int = 0, padding: int = 0,
    dtype: torch.dtype = BF16, bias: bool = True, unit_keys: bool = False, int64: bool = False, **options: Any,
) -> int:  # fmt: skip
    """How many chunks are in the other basis, where all records of such a call are right: off by less than rounding to bf16 explains."""
    x = inputs(lengths, heads, kind, v_heads, padding, dtype, batch)
    options = {"gate": "bounded", "l2norm": True, "beta_is_raw": True} | options
    if unit_keys:
        x["k"] = torch.nn.functional.normalize(x["k"].float(), dim=-1).to(dtype)
    if options["gate"] == "none":
        x["g"], x["dt_bias"] = -x["g"].abs() / (1000 if kind.startswith("period") else 1), None
    if not options["beta_is_raw"]:
        x["beta"] = x["beta"].float().sigmoid().to(dtype)
    if not bias:
        x["dt_bias"] = None
    if int64:
        x["cu"] = x["cu"].long()
    packed, HV = options.get("packed", True), x["g"].shape[2]
    tiles, decay, o, order = records(x, **options)
    starts, repeating = x["cu"].tolist(), 0
    for n, length in enumerate(lengths * (1 if packed else batch)):
        start, first = (starts[n], starts[n] // 64 + n) if packed else (0, n * -(-length // 64))
        for c, h in itertools.product(range(-(-length // 64)), range(HV)):
            want = exact(x, 0 if packed else n, start + 64 * c, min(start + 64 * c + 64, start + length), h, options)
            repeating += int(want["N"].any())
            got = record(tiles, decay, (first + c) * HV + h)
            assert difference(got["decay"], want["decay"], 1e-30) < 1e-4
            floors = {"ke": 1e-3 * want["plain ke"].norm().item(), "qk": max(0.2 * SCALE, want["plain qk"].norm().item())}
            for name in ("kd", "qd", "ke", "qk", "M"):
                off = difference(got[name], want[name], floors.get(name, 1e-30))
                assert off < 8e-3, f"{name} of sequence {n}, chunk {c}, head {h}: {off:.1e}"
    if packed:
        assert bool((o[:, : starts[-1]] == 7).all())
        assert bool((o[:, starts[-1] :] == 0).all())
        assert order.tolist() == sorted(range(len(lengths)), key=lambda n: (-lengths[n], n))
    return repeating


@pytest.mark.parametrize(
    ("lengths", "padding"), [([130, 1, 63], 0), ([2, 7, 8, 64, 65], 0), ([0, 3, 0, 0, 70, 0], 70), ([0, 0], 70), ([1, 2, 1, 3, 0, 2] * 43, 0)]
)
def test_lengths(lengths: list[int], padding: int):
    check(lengths, padding=padding)


@pytest.mark.parametrize("batched", [False, True])
def test_what_is_behind_a_sequence_is_not_seen(batched: bool):
    """NaN in the next sequence of a pack, or between the entries of a batch: not in the record of the last chunk, whose box it is in."""
    lengths, x = [70] if batched else [70, 58], {}
    for poisoned in (False, True):
        x[poisoned] = inputs(lengths, 1, batch=2 if batched else 1)
        for name in "qkg":
            whole = torch.full((2, 128, 1, 128), NAN if poisoned else 1.0, dtype=BF16)
            if batched:
                x[poisoned][name] = whole[:, :70].copy_(x[poisoned][name])
            elif poisoned:
                x[poisoned][name][:, 70:] = NAN
    got, want = (records(x[poisoned], packed=not batched) for poisoned in (True, False))
    chunks = 4 if batched else 2
    assert_same_bits(got[0][: chunks * 256], want[0][: chunks * 256], "tiles")
    assert_same_bits(got[1][:chunks, :128], want[1][:chunks, :128], "decay")


def test_heads():
    check([64, 65], 2, v_heads=4, padding=70)


def test_a_batch():
    check([130], 1, v_heads=2, batch=2, packed=False)


@pytest.mark.parametrize("kind", ["strong", "weak", "mixed", "steps", "small"])
def test_decay(kind: str):
    check([100], kind=kind)


@pytest.mark.parametrize(("kind", "repeating"), [("period 1", 4), ("period 2", 4), ("period 16", 2), ("period 33", 2), ("period 40", 2), ("one", 4)])
def test_keys_that_repeat(kind: str, repeating: int):
    assert check([64, 5, 70], kind=kind) == repeating


def test_keys_at_an_angle():
    check([128], kind="cosine .97")


@pytest.mark.parametrize("gate", ["softplus", "none", "bounded"])
@pytest.mark.parametrize("bias", [True, False])
def test_gates(gate: str, bias: bool):
    check([70], gate=gate, bias=bias, int64=True)
    assert check([70], kind="period 3", gate=gate, bias=bias)


def test_beta_itself():
    check([70], beta_is_raw=False)


def test_keys_as_they_are():
    check([70], l2norm=False, unit_keys=True)
    assert check([70], kind="period 2", l2norm=False, unit_keys=True)


def test_fp16():
    check([70], dtype=FP16)
    assert check([70], kind="period 2", dtype=FP16)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_one_key_at_every_token(dtype: torch.dtype):
    """The chunks in bf16 as the chain takes them, against the recurrence in float64: nothing piles up."""
    tokens = 2048
    x = inputs([tokens], kind="one", dtype=dtype)
    values = torch.randn(16, 128, generator=torch.Generator().manual_seed(1)).repeat(tokens // 16, 1).to(dtype).double()
    tiles, decay, *_ = records(x)

    def rounded(t: Tensor) -> Tensor:
        return t.bfloat16().double()

    q, k = normed(x["q"][0, 0, 0].double(), True) * SCALE, normed(x["k"][0, 0, 0].double(), True)
    decay, beta = torch.exp(LOWER_BOUND * torch.sigmoid(x["g"][0, 0, 0].double())), x["beta"][0, 0, 0].double().sigmoid()
    S, state, output, exact_output = torch.zeros(128, 128, dtype=torch.float64), torch.zeros(128, 128, dtype=torch.float64), [], []
    for c in range(tokens // 64):
        r, v = record(tiles, decay, c), values[64 * c : 64 * c + 64]
        u = rounded(r["M"] @ rounded(v - r["kd"] @ rounded(S).T))
        output.append(r["qd"] @ rounded(S).T + r["qk"] @ u)
        S = (S * r["decay"] + u.T @ r["ke"]).float().double()
        for t in range(64):
            state = state * decay
            state = state + beta * torch.outer(v[t] - state @ k, k)
            exact_output.append(state @ q)
    assert_close(torch.cat(output), torch.stack(exact_output), 4e-3, "output")
    assert_close(S, state, 5e-3, "state")


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Tokens of the chunks that are computed by levels, and of those of which some channels are, pair by pair."""
    found: dict[str, list[int]] = {}

    def noted(function: Any) -> Callable:
        name, names = function.function.__name__, inspect.getfullargspec(function.function).args
        found[name] = []

        def noting(*args: Any) -> Any:
            found[name].append(int(args[names.index("rows")]))
            return function(*args)

        return noting

    monkeypatch.setattr(prepare, "meet_by_levels", noted(levels.meet_by_levels))
    monkeypatch.setattr(prepare, "add_pairs", noted(pairs.add_pairs))
    return found


@pytest.mark.parametrize("gate", ["none", "softplus", "bounded"])
def test_chunks_that_decay_widely(ways: dict[str, list[int]], gate: str):
    """Of three, those in which channels decay by more than 2 ** 124 over 16 tokens; the bounded gate does not get there."""
    x = inputs([180])
    x["g"].fill_(-1.0 if gate == "none" else -20.0)
    strong = -6.0 if gate == "none" else 20.0
    x["g"][:, 80:96, :, 5:14] = strong
    x["g"][:, 144:160, :, 5:13] = strong
    records(x, gate=gate, wide=True)
    assert ways == {"meet_by_levels": [] if gate == "bounded" else [64], "add_pairs": [] if gate == "bounded" else [52]}


KINDS = ["times 10", "times 100", "times 1e4", "rare .01", "rare .1", "rare .5", "rare 1", "once 1e6", "once 200"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("l2norm", [True, False])
@pytest.mark.parametrize("channels", [1, 8, 128])
def test_wide_decay(ways: dict[str, list[int]], kind: str, l2norm: bool, channels: int):
    check([64, 5, 100], kind=f"{kind} of {channels}", gate="none", l2norm=l2norm, unit_keys=not l2norm)
    assert 64 in ways["meet_by_levels" if channels > 8 else "add_pairs"]


@pytest.mark.parametrize("weak", [6e-4, 0.3])
def test_strong_decay_costs_the_tokens_beside_it_no_digits(ways: dict[str, list[int]], weak: float):
    """In wide channels that hold nearly all of q and k, so that nothing else hides their errors."""
    check([64, 50], kind=f"beside {weak} of 8", gate="none")
    assert ways == {"meet_by_levels": [], "add_pairs": [64, 50]}


@pytest.mark.parametrize("number", [1.0, 4.0, 16.0])
def test_wide_softplus(ways: dict[str, list[int]], number: float):
    """Some channels decay by up to e ** -16 a logit, others hardly."""
    check([70, 130], 2, f"A {number}", v_heads=4, padding=70, gate="softplus")
    assert any(ways.values()) == (number > 1)


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 31, 32, 33, 48, 63])
@pytest.mark.parametrize("channels", [8, 128])
def test_wide_chunks_that_are_not_full(ways: dict[str, list[int]], tokens: int, channels: int):
    check([tokens], kind=f"rare .3 of {channels}", gate="none", padding=8)
    assert ways["meet_by_levels"] + ways["add_pairs"] == [tokens]


def test_wide_decay_of_fp16():
    check([70], kind="times 300", gate="none", dtype=FP16)
    assert check([70], kind="recurring 3", gate="none", dtype=FP16)


@pytest.mark.parametrize("period", [1, 2, 40])
@pytest.mark.parametrize("l2norm", [True, False])
def test_keys_that_repeat_in_wide_chunks(ways: dict[str, list[int]], period: int, l2norm: bool):
    assert check([64, 70], kind=f"recurring {period}", gate="none", l2norm=l2norm, unit_keys=not l2norm) >= 2
    assert (ways["meet_by_levels"] + ways["add_pairs"]).count(64) == 2


def test_a_missing_fence_is_found(monkeypatch: pytest.MonkeyPatch):
    for module, kind, gate in ((prepare, "random", "bounded"), (levels, "times 100", "none"), (pairs, "times 100 of 8", "none")):
        with monkeypatch.context() as patched:
            patched.setattr(module, "fence_async_shared", lambda: None)
            with pytest.raises(AssertionError, match="barrier behind a fence"):
                records(inputs([128], kind=kind), gate=gate)

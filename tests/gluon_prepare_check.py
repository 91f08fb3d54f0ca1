"""Runs the source of the Hopper prepare kernel on the CPU, with torch in place of Gluon, and compares its records with float64.

Values only: layouts, barriers and races are not looked at. `python tests/gluon_prepare_check.py [word ..]` prints the checks whose names have the
words, and fails where a tile is further off than rounding to bf16 explains.
"""

from __future__ import annotations

import math
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCE = Path(__file__).parents[1] / "src/kdaserve/ops/chunk_kda/sm90/prepare.py"
SCALE, LOWER_BOUND = 128**-0.5, -5.0
Call = dict[str, Any]


# Gluon in torch


class Pointer:
    """A tensor's memory from an element, or from each of many, on."""

    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = types.SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.offset + other)

    def to(self, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(self.offset)


class Shared:
    """A view of shared memory, which begins as NaN."""

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.dtype = memory, memory.dtype

    def store(self, value: Tensor) -> None:
        assert (value.shape, value.dtype) == (self.memory.shape, self.dtype)
        self.memory.copy_(value)

    def load(self, layout: Any) -> Tensor:
        return self.memory.clone()

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.memory.narrow(dim, int(start), length))

    def index(self, i: Any) -> Shared:
        return Shared(self.memory[int(i)])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.memory.permute(*order))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        assert dtype == self.dtype
        return Shared(self.memory.view(shape))

    def _keep_alive(self) -> None:
        pass


def tensor(x: Any, like: Any = None) -> Tensor:
    return x if torch.is_tensor(x) else torch.tensor(x, dtype=like.dtype if torch.is_tensor(like) else None)


def load(p: Pointer, mask: Any = None, other: Any = None) -> Tensor:
    offset = torch.as_tensor(p.offset)
    found = p.memory.reshape(-1)[offset if mask is None else torch.where(mask, offset, 0)].clone()
    return found if mask is None else torch.where(mask, found, torch.tensor(other, dtype=found.dtype))


def store(p: Pointer, value: Any, mask: Any = None) -> None:
    value, offset = tensor(value), torch.as_tensor(p.offset)
    assert value.ndim == 0 or value.dtype == p.memory.dtype, (value.dtype, p.memory.dtype)
    shape = torch.broadcast_shapes(offset.shape, value.shape, () if mask is None else mask.shape)
    mask = torch.ones(shape, dtype=torch.bool) if mask is None else mask.expand(shape)
    p.memory.view(-1)[offset.expand(shape)[mask]] = value.expand(shape)[mask].to(p.memory.dtype)


def where(condition: Any, x: Any, y: Any) -> Tensor:
    like = x if torch.is_tensor(x) else y if torch.is_tensor(y) else torch.zeros(())
    return torch.where(tensor(condition), tensor(x, like), tensor(y, like))


def both(function: Any) -> Any:
    return lambda x, y: function(tensor(x, y), tensor(y, x)).to((y if torch.is_tensor(y) else x if torch.is_tensor(x) else tensor(x)).dtype)


def assembly(code: str, constraints: str, arguments: list, dtype: Any, is_pure: bool, pack: int) -> Any:
    x = tensor(arguments[0]).float() if arguments else None
    known = {
        "shl": lambda: x,
        "ex2": lambda: torch.exp2(x),
        "rcp": lambda: 1 / x,
        "rsqrt": lambda: torch.rsqrt(x),
        "prefetch": lambda: x,
        "griddep": lambda: x,
    }
    return next(f for name, f in known.items() if name in code)()


def product(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    assert a.dtype == b.dtype == torch.float16
    return c + a.float() @ b.float()


def asynchronous_product(a: Shared, b: Shared, c: Tensor, use_acc: bool = True, is_async: bool = False) -> Tensor:
    new = a.memory.float() @ b.memory.float()
    return new + c if use_acc else new


def language() -> types.SimpleNamespace:
    gl = types.SimpleNamespace(pid=tensor(0), constexpr=lambda x: x, int32=torch.int32, int64=torch.int64)
    gl.float32, gl.float16, gl.bfloat16 = torch.float32, torch.float16, torch.bfloat16
    gl.load, gl.store, gl.where, gl.abs, gl.static_range = load, store, where, torch.abs, range
    gl.program_id, gl.num_programs = lambda axis: gl.pid, lambda axis: gl.programs
    gl.arange = lambda a, b, layout=None: torch.arange(a, b, dtype=torch.int32)
    gl.zeros = lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype)
    gl.full = lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype)
    gl.minimum, gl.maximum = both(torch.minimum), both(torch.maximum)
    gl.fma = lambda x, y, z: x * y + z
    gl.sum = lambda x, axis: x.sum(axis).to(x.dtype)
    gl.max = lambda x, axis: x.max(axis).values
    gl.associative_scan = lambda x, axis, f: x.cumsum(axis)
    gl.reshape, gl.expand_dims = lambda x, shape: x.reshape(shape), lambda x, axis: x.unsqueeze(axis)
    gl.permute, gl.join = lambda x, order: x.permute(*order), lambda x, y: torch.stack([x, y], -1)
    gl.convert_layout = lambda x, layout: x
    gl.thread_barrier = lambda: None
    gl.allocate_shared_memory = lambda dtype, shape, layout: Shared(torch.full(shape, math.nan if dtype.is_floating_point else -7, dtype=dtype))
    gl.inline_asm_elementwise = assembly
    for name in (
        "BlockedLayout",
        "SliceLayout",
        "DistributedLinearLayout",
        "NVMMADistributedLayout",
        "DotOperandLayout",
        "NVMMASharedLayout",
        "SwizzledSharedLayout",
    ):
        setattr(gl, name, lambda *a, **k: None)
    return gl


def kernel() -> Any:
    """The kernel's source as a function of torch, called with the number of programs first."""
    source = SOURCE.read_text()
    begin, wrapper, last = source.index("LOG2_E = "), source.index("class GluonKernel"), source.index("@gluon_kernel(")
    gl = language()
    softplus = types.SimpleNamespace(fn=lambda x: torch.nn.functional.softplus(x.double()).float() / math.log(2))
    scope = {
        "gl": gl, "gluon": types.SimpleNamespace(jit=lambda f: f), "gluon_kernel": lambda *vectors, own: lambda f: f,
        "fence_async_shared": lambda: None, "mma_v2": product,
        "warpgroup_mma": asynchronous_product, "warpgroup_mma_wait": lambda n, deps: deps,
        "math": types.SimpleNamespace(LOG2_E=1 / math.log(2), L2_EPS=1e-6, log2_softplus=softplus),
    }  # fmt: skip
    lines = [source[:begin].count("\n"), source[wrapper:last].count("\n")]
    text = "\n" * lines[0] + source[begin:wrapper] + "\n" * lines[1] + source[last:]
    exec(compile(text, str(SOURCE), "exec", flags=annotations.compiler_flag), scope)

    def run(programs: int, pointers: list, *numbers: Any, **constants: Any) -> None:
        gl.programs = programs
        for i in range(programs):
            gl.pid = torch.tensor(i, dtype=torch.int32)
            scope["prepare_kernel"](*[None if x is None else Pointer(x) for x in pointers], *numbers, **constants)

    return run


# Records


def inputs(
    lengths: list[int], heads: int = 1, kind: str = "random", v_heads: int = 0, padding: int = 0, dtype: torch.dtype = torch.bfloat16, batch: int = 1
) -> Call:
    """Bounded gate with parameters, raw beta; `kind` makes them hostile. With a batch all sequences have the one length."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    HV, T = v_heads or heads, sum(lengths) + padding
    q, k, g, beta = normal(batch, T, heads, 128), normal(batch, T, heads, 128), normal(batch, T, HV, 128), normal(batch, T, HV)
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
    if name == "small":
        k, q = 1e-3 * k, 1e-3 * q
    x = {"q": q.to(dtype).contiguous(), "k": k.to(dtype).contiguous(), "g": g.to(dtype).contiguous(), "beta": beta.to(dtype)}
    x |= {"A_log": torch.rand(HV, generator=generator) if name != "one" else torch.zeros(HV), "dt_bias": torch.rand(HV * 128, generator=generator)}
    if name == "one":
        x["dt_bias"].zero_()
    x["cu"] = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    if padding:
        for name in ("q", "k", "g", "beta"):
            x[name][:, sum(lengths) :] = math.nan
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


def record(tiles: Tensor, header: Tensor, r: int) -> dict[str, Tensor]:
    t = tiles[r * 256 : (r + 1) * 256].double()
    return {"kd": t[:64], "qd": t[64:128], "ke": t[128:192], "qk": t[192:, :64], "M": t[192:, 64:], "decay": header[r, :128].double()}


def prepare(
    x: Call, *, gate: str = "bounded", l2norm: bool = True, beta_is_raw: bool = True, mark: bool = False, packed: bool = True, rolled: bool = False,
    ahead: int = 0,
) -> tuple:  # fmt: skip
    """Tiles, header, output and order as the kernel leaves them; what it does not write is NaN, 7 or -1."""
    B, T, H, _ = x["q"].shape
    HV, N = x["g"].shape[2], len(x["cu"]) - 1 if packed else B
    units = T // 64 + N if packed else B * -(-T // 64)
    tiles, header = torch.full((units * HV * 256, 128), math.nan, dtype=torch.bfloat16), torch.full((units * HV, 160), math.nan)
    o, order = torch.full((B, T, HV, 128), 7.0, dtype=x["q"].dtype), torch.full((N,), -1, dtype=torch.int32)

    def strides(t: Tensor) -> list[int]:
        return [s // 8 for s in t.stride()[:3]]

    inputs, parameters = [x[name] for name in ("q", "k", "g", "beta")], (None, None) if gate == "none" else (x["A_log"], x["dt_bias"])
    kernel()(
        units * HV, [*inputs, *parameters, *((x["cu"], o) if packed else (None, None)), header, tiles, order if packed else None],
        *strides(x["q"]), *strides(x["k"]), *strides(x["g"]), *strides(o)[1:], *x["beta"].stride()[:3], N, T, H, HV, ahead, SCALE, LOWER_BOUND,
        GATE=gate, L2NORM=l2norm, BETA_RAW=beta_is_raw, MARK=gate != "bounded" or mark, ROLLED=rolled, PDL=True, UNIT=8,
    )  # fmt: skip
    return tiles, header, o, order


def difference(got: Tensor, want: Tensor, floor: float) -> float:
    """Norm of the difference by the norm of what is wanted, or by `floor` where that is smaller."""
    return ((got - want).norm() / want.norm().clamp_min(max(floor, 1e-300))).item() if got.isfinite().all() else math.inf


def check(
    lengths: list[int], heads: int = 1, kind: str = "random", *, batch: int = 1, v_heads: int = 0, padding: int = 0,
    dtype: torch.dtype = torch.bfloat16, bias: bool = True, unit_keys: bool = False, int64: bool = False, **options: Any,
) -> bool:  # fmt: skip
    """Whether the records of such a call are right, with what they are off by on a line."""
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
    tiles, header, o, order = prepare(x, **options)
    chunks = -(-lengths[0] // 64)
    worst: dict[str, float] = {"decay": 0.0}
    repeating = 0
    for n, length in enumerate(lengths * (1 if packed else batch)):
        for c in range(-(-length // 64)):
            for h in range(HV):
                start = int(x["cu"][n]) if packed else 0
                want = exact(x, 0 if packed else n, start + 64 * c, min(start + 64 * c + 64, start + length), h, options)
                got = record(tiles, header, ((start // 64 + n if packed else n * chunks) + c) * HV + h)
                repeating += int(want.pop("N").any())
                floor = {
                    "ke": 1e-3 * want.pop("plain ke").norm().item(),
                    "qk": max(0.2 * SCALE, want.pop("plain qk").norm().item()),
                    "kd": 1e-30,
                    "qd": 1e-30,
                    "decay": 1e-30,
                }
                for name, w in want.items():
                    worst[name] = max(worst.get(name, 0.0), difference(got[name], w, floor.get(name, 0.0)))
    end = int(x["cu"][-1])
    rest = (o == 7).all() if not packed else (o[:, :end] == 7).all() and (o[:, end:] == 0).all()
    sorted_ = not packed or order.tolist() == sorted(range(len(lengths)), key=lambda n: (-lengths[n], n))
    good = bool(rest) and sorted_ and max(worst.values()) < 8e-3 and (worst["decay"] < 1e-4)
    marks = f" mark {header[:, 128].nan_to_num(-1).max():.0f}" if options["gate"] != "bounded" else ""
    print(
        "ok  " if good else "FAIL",
        lengths,
        heads,
        kind,
        f"repeating {repeating}",
        {n: f"{e:.1e}" for n, e in worst.items()},
        f"padding {bool(rest)} order {sorted_}{marks}",
        flush=True,
    )
    return good


def check_long(dtype: torch.dtype, tokens: int = 4096) -> bool:
    """One key at every token: the chunks in bf16 as the chain takes them, against the recurrence in float64."""
    x = inputs([tokens], kind="one", dtype=dtype)
    values = torch.randn(16, 128, generator=torch.Generator().manual_seed(1)).repeat(tokens // 16, 1).to(dtype).double()
    tiles, header, _, _ = prepare(x)

    def rounded(t: Tensor) -> Tensor:
        return t.bfloat16().double()

    q, k = normed(x["q"][0, 0, 0].double(), True) * SCALE, normed(x["k"][0, 0, 0].double(), True)
    decay, beta = torch.exp(LOWER_BOUND * torch.sigmoid(x["g"][0, 0, 0].double())), x["beta"][0, 0, 0].double().sigmoid()
    S, state, output, exact_output = torch.zeros(128, 128, dtype=torch.float64), torch.zeros(128, 128, dtype=torch.float64), [], []
    for c in range(tokens // 64):
        r, v = record(tiles, header, c), values[64 * c : 64 * c + 64]
        u = rounded(r["M"] @ rounded(v - r["kd"] @ rounded(S).T))
        output.append(r["qd"] @ rounded(S).T + r["qk"] @ u)
        S = (S * r["decay"] + u.T @ r["ke"]).float().double()
        for t in range(64):
            state = state * decay
            state = state + beta * torch.outer(v[t] - state @ k, k)
            exact_output.append(state @ q)
    errors = difference(torch.cat(output), torch.stack(exact_output), 0.0), difference(S, state, 0.0)
    good = errors[0] < 4e-3 and errors[1] < 5e-3
    print("ok  " if good else "FAIL", f"one key {tokens} times, {dtype}: output {errors[0]:.1e} state {errors[1]:.1e}", flush=True)
    return good


def check_marks() -> bool:
    """Of three chunks the one in which a channel decays by more than 2 ** 124 over 16 tokens is marked, and an empty record is not."""
    good = True
    for gate in ("none", "softplus", "bounded"):
        x = inputs([192])
        if gate == "none":
            x["g"].fill_(-1.0)
            x["g"][:, 80:96, :, 5] = -6.0
        else:
            x["g"].fill_(-20.0)
            x["g"][:, 80:96, :, 5] = 20.0
        header = prepare(x, gate=gate, mark=True)[1]
        wanted = [0, 0 if gate == "bounded" else 1, 0, 0]
        good &= header[:, 128].tolist() == wanted
        print("ok  " if header[:, 128].tolist() == wanted else "FAIL", f"marks, {gate}: {header[:, 128].tolist()}", flush=True)
    return good


CHECKS = {
    "lengths": lambda: check([130, 1, 63]) & check([2, 7, 8, 64, 65], 1) & check([0, 3, 0, 0, 70, 0], padding=70) & check([0, 0]),
    "rolled": lambda: check([130], rolled=True, ahead=2) & check([65], rolled=True, kind="period 2"),
    "heads": lambda: check([64, 65], 2, v_heads=4, padding=70, ahead=3),
    "batch": lambda: check([130], 1, v_heads=2, batch=2, packed=False, ahead=1),
    "decay": lambda: all(check([100], kind=kind) for kind in ("strong", "weak", "mixed", "steps", "small")),
    "repeat": lambda: all(check([64, 5, 70], kind=f"period {n}") for n in (1, 2, 16, 33, 40)),
    "cosine": lambda: check([128], kind="cosine .97"),
    "one": lambda: check([64, 7], kind="one"),
    "gates": lambda: all(check([70], gate=gate, bias=bias, int64=True) for gate in ("softplus", "none", "bounded") for bias in (True, False)),
    "gates repeat": lambda: all(check([70], kind="period 3", gate=gate, bias=bias) for gate in ("softplus", "none") for bias in (True, False)),
    "marks": check_marks,
    "beta": lambda: check([70], beta_is_raw=False),
    "norm": lambda: check([70], l2norm=False, unit_keys=True) & check([70], kind="period 2", l2norm=False, unit_keys=True),
    "half": lambda: check([70], dtype=torch.float16) & check([70], kind="period 2", dtype=torch.float16),
    "many": lambda: check([1, 2, 1, 3, 0, 2] * 60, kind="weak"),
    "long": lambda: check_long(torch.bfloat16) & check_long(torch.float16),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    chosen = [f for name, f in CHECKS.items() if not sys.argv[1:] or set(name.split()) & set(sys.argv[1:])]
    sys.exit(not all(f() for f in chosen))

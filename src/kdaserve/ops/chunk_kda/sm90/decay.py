"""What the Hopper prepare kernel does element by element: gate and norms, and a slice of a chunk decayed to where it is wanted.

A warp has a quarter of the tokens, so sums along tokens stay in it but for the totals of the quarters; tensors are pieces
`[4 quarters, 4 groups of 4 tokens, channels]`, one token of each group, 8 channels a thread.
"""
# ruff: noqa: RUF005 (kernels add tuples: their compiler does not unpack them)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kdaserve.ops.chunk_kda.sm90.layouts import PLAIN, TILE, C
from kdaserve.ops.chunk_kda.sm90.space import K
from kdaserve.ops.jit import math

LOG2_E = math.LOG2_E
L2_EPS = math.L2_EPS
BS = gl.constexpr(64)
"""Channels of a slice. A chunk is worked on in two slices, so that what belongs to one fits into registers."""
TB = gl.constexpr(4)
"""Tokens of a group: a thread has these of 8 channels of a slice."""
PIECE = gl.constexpr(gl.BlockedLayout([1, 1, 8], [1, 4, 8], [4, 1, 1], [2, 1, 0]))
"""Of `[4 quarters, 4 groups, BS]`."""
TOKENS = gl.constexpr(gl.SliceLayout(2, PIECE))
CHANNELS = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(0, PIECE)))
ROWS = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], [1, 0], [2, 0]], [[0, 8], [0, 16], [0, 32], [4, 0], [8, 0]], [[16, 0], [32, 0]], [], [64, 64])
)
"""The same numbers as rows of the chunk `[64, BS]`; nothing moves."""
OWN = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]))
"""Of channels whose factors a thread makes for all."""

log2_softplus = gluon.jit(math.log2_softplus.fn)


# Numbers


@gluon.jit
def ex2(x):
    """2 ** x, one instruction; zero below 2 ** -126."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def ex2_small(x):
    """2 ** x down to 2 ** -149."""
    root = ex2(x * 0.5)
    return root * root


@gluon.jit
def rcp(x):
    """The reciprocal, one instruction."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def rsq(x):
    """The reciprocal of the root, one instruction."""
    return gl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def wide(x):
    """As fp32; of two bf16 numbers by two instructions, where the compiler takes three."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }", "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(gl.float32)


@gluon.jit
def add(x, y):
    """For scans."""
    return x + y


@gluon.jit
def gate_factors(a, lower_bound, GATE: gl.constexpr):
    """What `gate` takes its logit times, and what its result is to be multiplied with."""
    if GATE == "bounded":
        return a * -LOG2_E, lower_bound * LOG2_E
    elif GATE == "softplus":
        return 1.0, a * -1.0
    else:
        return LOG2_E, 1.0


@gluon.jit
def gate(b_x, outer, m_t, GATE: gl.constexpr):
    """Log decay in base 2 of a scaled logit, zero where m_t is. No result sees the bound of -1e6; sums need it to stay finite."""
    if GATE == "bounded":
        b_g = rcp(1.0 + ex2(b_x)) * (outer * m_t)  # G2
    else:
        if GATE == "softplus":
            b_x = log2_softplus(b_x) * outer  # G1
        b_g = gl.where(b_x < -1e6, -1e6, b_x) * m_t
    return b_g


# Slices


@gluon.jit
def pieces_of(sX):
    """The rows of a box `[64, BS]` by piece: the first tokens of all groups, the second ones, .."""
    t = gl.permute(gl.reshape(sX.load(ROWS), [4, 4, 2, 2, BS]), (0, 1, 4, 2, 3))
    even, odd = gl.split(t)
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    return gl.convert_layout(x0, PIECE), gl.convert_layout(x1, PIECE), gl.convert_layout(x2, PIECE), gl.convert_layout(x3, PIECE)


@gluon.jit
def rows_of(pieces):
    """The pieces as rows of the chunk `[64, BS]`."""
    t = gl.join(gl.join(pieces[0], pieces[2]), gl.join(pieces[1], pieces[3]))
    return gl.reshape(gl.permute(t, (0, 1, 3, 4, 2)), [C, BS])


@gluon.jit
def tokens_of(pieces):
    """The pieces `[4 quarters, 4 groups]` as tokens of the chunk `[64]`."""
    return gl.reshape(gl.join(gl.join(pieces[0], pieces[2]), gl.join(pieces[1], pieces[3])), [C])


@gluon.jit
def norms(sX0, sX1, i_t, rows, scale, L2NORM: gl.constexpr):
    """By piece what the rows of both slices are multiplied with: the norm and the scale, zero behind the sequence."""
    found = ()
    if L2NORM:
        xs0 = pieces_of(sX0)
        xs1 = pieces_of(sX1)
    for i in gl.static_range(TB):
        norm = gl.where(i_t + i < rows, scale, 0.0)
        if L2NORM:
            norm *= rsq(gl.sum(squares(xs0[i], xs1[i]), 2) + L2_EPS)
        found = found + (norm,)
    return found


@gluon.jit
def squares(b_x, b_y):
    """Of both slices, added."""
    b_x = wide(b_x)
    b_y = wide(b_y)
    return gl.fma(b_y, b_y, b_x * b_x)


@gluon.jit
def running_decay(xs, b_bias, i_t, rows, inner, outer, GATE: gl.constexpr):
    """E5 within each group of tokens: by piece the sum of the log decays of the group's tokens up to its own."""
    b_bias = b_bias[None, :][None, :, :] * inner
    sums = ()
    for i in gl.static_range(TB):
        m_t = gl.where(i_t + i < rows, 1.0, 0.0)[:, :, None]
        b_g = gate(wide(xs[i]) * inner + b_bias, outer, m_t, GATE)
        if i > 0:
            b_g = b_g + sums[i - 1]
        sums = sums + (b_g,)  # E5
    return sums


@gluon.jit
def decay_factors(b_total, sWidest, p_decay, WIDE: gl.constexpr):
    """Factors `[4, BS]` of the channels from the log decays of the quarters, and the decay of the chunk to memory.

    Args:
        sWidest: `[1, BS]`, if WIDE for the widest log decays of a quarter: no token is further from the middle of its half.

    Returns:
        Factors from the chunk's start to the middle of the quarter's half; from there to the chunk's end; from the first middle to the boundary of
        the halves, and from the boundary to the second middle (two factors, as their product may be too small for one).
    """
    QUARTERS: gl.constexpr = gl.SliceLayout(1, PIECE)
    sT = gl.allocate_shared_memory(gl.float32, [4, BS], PLAIN)
    sU = gl.allocate_shared_memory(gl.float32, [4, BS], PLAIN)
    sV = gl.allocate_shared_memory(gl.float32, [4, BS], PLAIN)
    sW = gl.allocate_shared_memory(gl.float32, [4, BS], PLAIN)
    sX = gl.allocate_shared_memory(gl.float32, [4, BS], PLAIN)
    sT.store(b_total)
    gl.thread_barrier()
    i_4 = gl.arange(0, 4, gl.SliceLayout(1, OWN))[:, None]
    o_c = gl.arange(0, BS, gl.SliceLayout(0, OWN))[None, :]
    late = i_4 >= 2
    b_0 = sT.slice(0, 1, dim=0).load(OWN)
    b_1 = sT.slice(1, 1, dim=0).load(OWN)
    b_2 = sT.slice(2, 1, dim=0).load(OWN)
    b_3 = sT.slice(3, 1, dim=0).load(OWN)
    sU.store(ex2_small(gl.where(late, (b_0 + b_1) + b_2, b_0)))
    sV.store(ex2_small(gl.where(late, b_3, b_1 + (b_2 + b_3))))
    sW.store(ex2(gl.where(late, 0.0, b_1)))
    sX.store(ex2(gl.where(late, 0.0, b_2)))
    gl.store(p_decay + o_c + 0 * i_4, ex2(gl.where(i_4 >= 0, (b_0 + b_1) + (b_2 + b_3), 0.0)), mask=(i_4 == 0) & (o_c >= 0))
    if WIDE:
        sWidest.store(gl.maximum(gl.maximum(-b_0, -b_1), gl.maximum(-b_2, -b_3)))
    gl.thread_barrier()
    return sU.load(QUARTERS)[:, None, :], sV.load(QUARTERS)[:, None, :], sW.load(QUARTERS)[:, None, :], sX.load(QUARTERS)[:, None, :]


@gluon.jit
def decay_slice(
    s, sK, sQ, sG, sX, sBias, p_tile, p_decay, k_norms, q_norms, inner, outer, i_t, o_c, rows, sWidest,
    GATE: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Slice s: its part of kd, qd, ke and of the chunk's decay to memory, the operands of E6 and of the q.k of E10 to shared memory.

    Args:
        sK, sQ, sG: `[64, BS]`, k, q and gate logits, and in their places afterwards rows of k, rows of q, and columns for tokens of the same half.
        sX: likewise, columns of the first half for the second.
        sBias: `[2, BS]`, or None; p_tile, p_decay: the channels of the slice begin at s * BS; o_c are those of a thread.
        sWidest: see `decay_factors`.
    """
    xs = pieces_of(sG)
    ks = pieces_of(sK)
    qs = pieces_of(sQ)
    p_tile += i_t[:, :, None] * K + (s * BS + o_c)
    b_bias = gl.zeros([BS], gl.float32, CHANNELS)
    if sBias is not None:
        b_bias = sBias.index(s).load(CHANNELS)
    sums = running_decay(xs, b_bias, i_t, rows, inner, outer, GATE)
    b_group = sums[TB - 1]
    b_total = gl.sum(b_group, 1)
    i_4 = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(1, PIECE)))[:, None]
    b_start = gl.associative_scan(b_group, 1, add) - b_group - gl.where((i_4 & 1) == 0, b_total, 0.0)[:, None, :]  # from the middle to the group
    u, v, w, x = decay_factors(b_total, sWidest, p_decay + s * BS, WIDE)
    Rks = ()
    Rqs = ()
    Cs = ()
    Xs = ()
    for i in gl.static_range(TB):
        b_e = sums[i] + b_start
        b_factor = ex2(b_e)
        b_k = wide(ks[i]) * k_norms[i][:, :, None]
        b_Rk = b_k * b_factor
        b_Rq = wide(qs[i]) * q_norms[i][:, :, None] * b_factor
        b_C = b_k * ex2(-b_e)
        gl.store(p_tile + i * K, (b_Rk * u).to(gl.bfloat16))
        gl.store(p_tile + (i + C) * K, (b_Rq * u).to(gl.bfloat16))
        gl.store(p_tile + (i + 2 * C) * K, (b_C * v).to(gl.bfloat16))
        Rks = Rks + (b_Rk.to(gl.bfloat16),)
        Rqs = Rqs + (b_Rq.to(gl.bfloat16),)
        Cs = Cs + (b_C.to(gl.bfloat16),)
        Xs = Xs + ((b_C * w * x).to(gl.bfloat16),)
    sK._reinterpret(gl.bfloat16, [C, BS], TILE).store(rows_of(Rks))
    sQ._reinterpret(gl.bfloat16, [C, BS], TILE).store(rows_of(Rqs))
    sG._reinterpret(gl.bfloat16, [C, BS], TILE).store(rows_of(Cs))
    sX.store(rows_of(Xs))

"""Prefill on Hopper, first kernel: what a chunk can compute without knowing the state it starts from. One program, four warps, a chunk and head.

A record is a header of fp32 numbers `[160]`, the decay of the chunk (128) and a mark, and tiles of bf16 rows of 128: k decayed from the chunk's start
(64 rows), q likewise (64), k decayed to the chunk's end (64), and 64 rows of which the left half is the q.k of E10 and the right half M beta.

**Where tokens meet.** A chunk of 64 tokens is four quarters. Tokens of a half meet at its middle: with e the log decay from there to the token, the
row's factor is 2 ** e and the column's 2 ** -e. Both stay within 2 ** +-124 while no 16 tokens decay by more than that; for the bounded gate with
lower_bound >= -5 this always holds; otherwise the chunks where it does not can be marked. Everything else follows from these two by factors <= 1 of a
channel: kd and qd are the rows times the decay from the chunk's start to the middle, ke is the column times the decay from the middle to the end,
and tokens of different halves meet at the middle of the second one, where the rows are the same and the columns get smaller still.

**Who has what.** In the part that is done element by element a warp has a quarter of the tokens, so sums along tokens stay in it but for the totals
of the quarters; tensors are pieces `[4 quarters, 4 groups of 4 tokens, channels]`, one token of each group, 8 channels a thread. From the products on
a warp has 16 rows of the chunk, and E7 begins with four blocks of 16, one a warp, in registers.

**Keys that repeat.** Where they do, the chunk is written in another basis, as docs/design/triton-backend.md explains. N picks for each token the last
one before it whose key it repeats; q.k becomes (q.k) (I - N), the matrix to invert (I + beta A) (I - N), and ke becomes (I - N)^T ke. This is a
branch of its own whose numbers go through shared memory, so that it takes no registers from chunks without repetitions.

Keys are expected to be normed, or to be no longer than that: E7 rounds A and M to fp16.
"""
# ruff: noqa: RUF005 (kernels add tuples: their compiler does not unpack them)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mma_v2, warpgroup_mma, warpgroup_mma_wait

from kdaserve.ops.jit import math
from kdaserve.ops.jit.launch import kernel

LOG2_E = math.LOG2_E
L2_EPS = math.L2_EPS
C = gl.constexpr(64)
K = gl.constexpr(128)
"""Channels of a key, and of a value."""
HEADER = gl.constexpr(160)
"""Floats of a record's header."""
ROWS = gl.constexpr(256)
"""Rows of a record's tiles."""
WIDEST = gl.constexpr(124.0)
"""The log2 decay between a token and the middle of its half up to which factors are formed there: they hold 2 ** 124 times a normed key."""
NEAR = gl.constexpr(0.95)
"""A token repeats an earlier one if the product of their keys, decay included, is more than this share of the token's own square."""
BS = gl.constexpr(64)
"""Channels of a slice. A chunk is worked on in two slices, so that what belongs to one fits into registers."""
TB = gl.constexpr(4)
"""Tokens of a group: a thread has these of 8 channels of a slice."""
PIECE = gl.constexpr(gl.BlockedLayout([1, 1, 8], [1, 4, 8], [4, 1, 1], [2, 1, 0]))
"""Of `[4 quarters, 4 groups, BS]`."""
TOKENS = gl.constexpr(gl.SliceLayout(2, PIECE))
CHANNELS = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(0, PIECE)))
VECTOR = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
PAIRS = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
"""Products `[64, 32]` of the asynchronous matrix units."""
HALVES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 8, 0], [0, 0, 8], [0, 0, 16]],
        [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[0, 16, 0], [1, 0, 0]],
        [],
        [2, 32, 32],
    )
)
"""The same numbers as `[half, row, column]`; nothing moves."""
BLOCKS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 8, 0, 0], [0, 0, 0, 8], [0, 0, 1, 0]], [[0, 0, 0, 2], [0, 0, 0, 4], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        [[1, 0, 0, 0], [2, 0, 0, 0]], [], [4, 16, 2, 16],
    )
)  # fmt: skip
"""The same numbers as `[block of 16 rows, row, block of 16 columns, column]`; nothing moves."""
BLOCK = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))
"""Products of blocks `[4, 16, 16]`, a block a warp."""
LEFT = gl.constexpr(gl.DotOperandLayout(0, BLOCK, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, BLOCK, 2))
EARLIER = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1, 0], [0, 0, 8, 0], [0, 0, 0, 8]], [[0, 0, 2, 0], [0, 0, 4, 0], [0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4]],
        [[0, 1, 0, 0], [1, 0, 0, 0]], [], [2, 2, 16, 16],
    )
)  # fmt: skip
"""Right operands as `[pair of blocks, which of the pair, row, column]`."""
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
"""Products `[32, 32]` of the last step of E7."""
LINES = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
"""Rows of 128, 16 bytes a thread."""
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
OWN = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]))
"""Of channels whose factors a thread makes for all."""
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))

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


# Places


@gluon.jit
def first_unit(p_cu, n):
    """The unit, that is chunk of a sequence, with which sequence n begins: there is room for all chunks before it, whatever the lengths."""
    return (gl.load(p_cu + n) // C).to(gl.int32) + n


@gluon.jit
def sequence_of(p_cu, N, unit):
    """The last sequence whose first unit is not behind `unit`, by bisection."""
    low = 0
    high = N
    while low + 1 < high:
        middle = (low + high) // 2
        if first_unit(p_cu, middle) <= unit:
            low = middle
        else:
            high = middle
    return low


@gluon.jit
def rank_sequence(p_cu, p_order, n, N):
    """Writes n where it stands among the sequences, the longest first: a chain that begins late must not be a long one."""
    o_n = gl.arange(0, 256, PAIRS)
    length = gl.load(p_cu + n + 1) - gl.load(p_cu + n)
    before = 0
    for i_n in range(0, N, 256):
        m_n = i_n + o_n < N
        other = gl.load(p_cu + i_n + o_n + 1, mask=m_n, other=0) - gl.load(p_cu + i_n + o_n, mask=m_n, other=0)
        m_n = m_n & ((other > length) | ((other == length) & (i_n + o_n < n)))
        before += gl.sum(m_n.to(gl.int32), 0)
    gl.store(p_order + before, n)


@gluon.jit
def zero_padding(p_o, o_t, first, end, T):
    """S4: zeros in those of the 64 output rows from `first` on that no sequence covers."""
    o_v = gl.arange(0, K, gl.SliceLayout(0, LINES))
    o_r0 = gl.arange(0, 8, gl.SliceLayout(1, LINES))
    for i_r in range(0, C, 8):
        o_r = first + i_r + o_r0
        p_row = p_o + o_r.to(gl.int64)[:, None] * o_t + o_v[None, :]
        gl.store(p_row, gl.zeros([8, K], p_o.dtype.element_ty, LINES), mask=((o_r >= end) & (o_r < T))[:, None] & (o_v >= 0)[None, :])


@gluon.jit
def load_rows(p, stride, i_t, o_c, rows):
    """TB pieces: the tokens i_t, i_t + 1, ..; behind the sequence its last one again."""
    found = ()
    for i in gl.static_range(TB):
        found = found + (gl.load(p + (gl.minimum(i_t + i, rows - 1)[:, :, None] * stride + o_c)),)
    return found


@gluon.jit
def prefetch_rows(p, stride, rows):
    """Brings 64 rows of a slice into the first cache."""
    o_r = gl.arange(0, C, VECTOR)
    address = (p + gl.minimum(o_r, rows - 1) * stride).to(gl.int64)
    gl.inline_asm_elementwise("{ prefetch.global.L1 [$1]; mov.b32 $0, 0; }", "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def rows_of(pieces):
    """The pieces as rows of the chunk `[64, BS]`."""
    t = gl.join(gl.join(pieces[0], pieces[2]), gl.join(pieces[1], pieces[3]))
    return gl.reshape(gl.permute(t, (0, 1, 3, 4, 2)), [C, BS])


@gluon.jit
def side_by_side(left, right):
    """[64, 64] of two [2, 32, 32]."""
    return gl.reshape(gl.permute(gl.join(left, right), (0, 1, 3, 2)), [C, C])


# Element by element


@gluon.jit
def norms(p_k, p_q, k_t, q_t, i_t, o_c, rows, scale, L2NORM: gl.constexpr):
    """By piece what k and q are multiplied with: the norm and the scale, zero behind the sequence."""
    k_norms = ()
    q_norms = ()
    if L2NORM:
        ks0 = load_rows(p_k, k_t, i_t, o_c, rows)
        qs0 = load_rows(p_q, q_t, i_t, o_c, rows)
        ks1 = load_rows(p_k + BS, k_t, i_t, o_c, rows)
        qs1 = load_rows(p_q + BS, q_t, i_t, o_c, rows)
    for i in gl.static_range(TB):
        k_norm = gl.where(i_t + i < rows, 1.0, 0.0)
        q_norm = k_norm * scale
        if L2NORM:
            k_norm *= rsq(gl.sum(squares(ks0[i], ks1[i]), 2) + L2_EPS)
            q_norm *= rsq(gl.sum(squares(qs0[i], qs1[i]), 2) + L2_EPS)
        k_norms = k_norms + (k_norm,)
        q_norms = q_norms + (q_norm,)
    return k_norms, q_norms


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
def decay_factors(b_total, b_widest, p_decay):
    """Factors `[4, BS]` of the channels from the log decays of the quarters, and the decay of the chunk to memory.

    Returns:
        b_widest, or the widest log decays of a quarter so far, `[1, BS]` in OWN: no token is further from the middle of its half. Factors from the
        chunk's start to the middle of the quarter's half; from there to the chunk's end; from the first middle to the boundary of the halves, and
        from the boundary to the second middle (two factors, as their product may be too small for one).
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
    b_widest = gl.maximum(b_widest, gl.maximum(gl.maximum(-b_0, -b_1), gl.maximum(-b_2, -b_3)))
    gl.thread_barrier()
    return b_widest, sU.load(QUARTERS)[:, None, :], sV.load(QUARTERS)[:, None, :], sW.load(QUARTERS)[:, None, :], sX.load(QUARTERS)[:, None, :]


@gluon.jit
def decay_slice(
    s, xs, p_k, p_q, p_bias, p_tile, p_decay, k_t, q_t, k_norms, q_norms, inner, outer, i_t, o_c, rows, sRk, sRq, sC, sX, b_widest,
    GATE: gl.constexpr,
):  # fmt: skip
    """Slice s: its part of kd, qd, ke and of the chunk's decay to memory, the operands of E6 and of the q.k of E10 to shared memory.

    Args:
        p_k, p_q, p_tile, o_c: its channels are at o_c; p_bias, p_decay: its channels begin at s * BS.
        xs: its gate logits. k and q come from the caches again: the pass for their norms keeps nothing in registers.
        sRk, sRq, sC, sX: `[2, 64, BS]`, rows of k and of q, columns for tokens of the same half, columns of the first half for the second.

    Returns:
        b_widest, or the widest log decays of a quarter so far, by channel.
    """
    ks = load_rows(p_k, k_t, i_t, o_c, rows)
    qs = load_rows(p_q, q_t, i_t, o_c, rows)
    p_tile += i_t[:, :, None] * K + o_c
    b_bias = gl.zeros([BS], gl.float32, CHANNELS)
    if p_bias is not None:
        b_bias = gl.load(p_bias + s * BS + gl.arange(0, BS, CHANNELS)).to(gl.float32)
    sums = running_decay(xs, b_bias, i_t, rows, inner, outer, GATE)
    b_group = sums[TB - 1]
    b_total = gl.sum(b_group, 1)
    i_4 = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(1, PIECE)))[:, None]
    b_start = gl.associative_scan(b_group, 1, add) - b_group - gl.where((i_4 & 1) == 0, b_total, 0.0)[:, None, :]  # from the middle to the group
    b_widest, u, v, w, x = decay_factors(b_total, b_widest, p_decay + s * BS)
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
    sRk.index(s).store(rows_of(Rks))
    sRq.index(s).store(rows_of(Rqs))
    sC.index(s).store(rows_of(Cs))
    sX.index(s).store(rows_of(Xs))
    return b_widest


# Products


@gluon.jit
def meet(sRk, sRq, sC, sX, k1, k2, kx, q1, q2, qx, FIRST: gl.constexpr):
    """E6 and the q.k of E10 of a slice, started: all rows with the columns of the first half, of the second, and of the first in the second."""
    c1 = sC.slice(0, 32, dim=0).permute((1, 0))
    c2 = sC.slice(32, 32, dim=0).permute((1, 0))
    cx = sX.slice(0, 32, dim=0).permute((1, 0))
    k1 = warpgroup_mma(sRk, c1, k1, use_acc=not FIRST, is_async=True)  # E6
    k2 = warpgroup_mma(sRk, c2, k2, use_acc=not FIRST, is_async=True)
    kx = warpgroup_mma(sRk, cx, kx, use_acc=not FIRST, is_async=True)
    q1 = warpgroup_mma(sRq, c1, q1, use_acc=not FIRST, is_async=True)  # E10
    q2 = warpgroup_mma(sRq, c2, q2, use_acc=not FIRST, is_async=True)
    qx = warpgroup_mma(sRq, cx, qx, use_acc=not FIRST, is_async=True)
    return k1, k2, kx, q1, q2, qx


@gluon.jit
def by_halves(x):
    """A product `[64, 32]` as `[half, row, column]`."""
    return gl.convert_layout(gl.reshape(x, [2, 32, 32]), HALVES)


@gluon.jit
def half_row_col():
    """Indices of a tensor in HALVES."""
    half = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, HALVES)))[:, None][:, :, None]
    row = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, HALVES)))[None, :][:, :, None]
    col = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(0, HALVES)))[None, :][None, :, :]
    return half, row, col


# Keys that repeat


@gluon.jit
def token_of(sToken, t):
    """One of 64 numbers, a scalar."""
    return gl.max(sToken._reinterpret(sToken.dtype, [C, 1], LINE).index(t).load(VECTOR), 0)


@gluon.jit
def row_of(sS, t):
    """Row t of `[C, 256]`."""
    return sS._reinterpret(gl.float32, [C, 2 * K], LINE).index(t)


@gluon.jit
def store_columns(sS, first_row, left, right, half):
    """A lower triangular matrix of two `[half, row, column]`, the rows of all with the first columns and with the second; column t to row t of sS."""
    both = side_by_side(left, gl.where(half == 1, right, 0.0))
    sS.slice(first_row, C, dim=1).permute((1, 0)).store(both)


@gluon.jit
def load_columns(sS, first_row):
    """The reverse of `store_columns`."""
    sS = sS.slice(first_row, C, dim=1)
    left = by_halves(sS.slice(0, 32, dim=0).permute((1, 0)).load(ACC))
    right = by_halves(sS.slice(32, 32, dim=0).permute((1, 0)).load(ACC))
    return left, right


@gluon.jit
def store_keys(sS, sNorm, p_k, p_g, p_bias, k_t, g_t, rows, inner, outer, GATE: gl.constexpr):
    """The keys decayed to the chunk's end, in fp32, token t to row t of sS behind the first 128; from the last token on, a channel a thread."""
    o_c = gl.arange(0, K, VECTOR)
    b_bias = gl.zeros([K], gl.float32, VECTOR)
    if p_bias is not None:
        b_bias = gl.load(p_bias + o_c).to(gl.float32) * inner
    b_e = gl.zeros([K], gl.float32, VECTOR)
    for i_t in range(0, C, 8):
        ks = ()
        xs = ()
        for i in gl.static_range(8):
            t = gl.minimum(C - 1 - i_t - i, rows - 1)
            ks = ks + (gl.load(p_k + t * k_t + o_c),)
            xs = xs + (gl.load(p_g + t * g_t + o_c),)
        for i in gl.static_range(8):
            t = C - 1 - i_t - i
            norm = token_of(sNorm, (t % TB) * (C // TB) + t // TB)
            row_of(sS, t).slice(K, K, dim=0).store(ks[i].to(gl.float32) * norm * ex2(b_e))
            b_e += gate(xs[i].to(gl.float32) * inner + b_bias, outer, gl.where(t < rows, 1.0, 0.0), GATE)


@gluon.jit
def subtract_repeated(sS, sLast):
    """Takes row t of sS from row last(t), token after token, which makes (X (I - N))^T of X^T. No thread needs another's numbers.

    Row t is subtracted before anything is subtracted from it: what repeats it comes later.
    """
    for t in range(1, C):
        last = token_of(sLast, t)
        if last >= 0:
            row_of(sS, last).store(row_of(sS, last).load(PAIRS) - row_of(sS, t).load(PAIRS))


@gluon.jit
def last_repeated(b_k, b_kx, b_square):
    """Of each row the last column of the chunk that it repeats, -1 if none, `[half, row]`."""
    half, row, col = half_row_col()
    b_near = NEAR * b_square[:, :, None]
    b_last = gl.where((row > col) & (b_k > b_near), col + 32 * half, -1)
    b_lastx = gl.where((half == 1) & (b_kx > b_near), col, -1)
    return gl.max(gl.maximum(b_last, b_lastx), 2)


@gluon.jit
def without_repetitions(
    b_k, b_kx, b_q, b_qx, b_square, beta_row, sLast, sNorm, p_k, p_g, p_bias, p_ke, k_t, g_t, rows, inner, outer, GATE: gl.constexpr
):  # fmt: skip
    """The chunk in the other basis: q.k (I - N), (I + beta A) (I - N) - I, and to memory (I - N)^T ke.

    Args:
        b_k, b_kx: A before beta, rows of a half with its own columns and of the second half with the columns of the first; b_q, b_qx: q.k likewise.
    """
    half, row, col = half_row_col()
    b_last = last_repeated(b_k, b_kx, b_square)
    sLast.store(b_last)
    sS = gl.allocate_shared_memory(gl.float32, [C, 2 * K], PLAIN)
    b_k = gl.where(row > col, b_k * beta_row, 0.0)
    store_columns(sS, 0, gl.where(half == 0, b_k, b_kx * beta_row), b_k, half)
    store_columns(sS, C, gl.where(half == 0, b_q, b_qx), b_q, half)
    store_keys(sS, sNorm, p_k, p_g, p_bias, k_t, g_t, rows, inner, outer, GATE)
    gl.thread_barrier()
    subtract_repeated(sS, sLast)
    gl.thread_barrier()
    o_r = gl.arange(0, C, gl.SliceLayout(1, LINES))
    o_c = gl.arange(0, K, gl.SliceLayout(0, LINES))
    gl.store(p_ke + o_r[:, None] * K + o_c[None, :], sS.slice(K, K, dim=1).load(LINES).to(gl.bfloat16))
    left, right = load_columns(sS, 0)
    b_last = b_last[:, :, None]
    b_k = gl.where(half == 0, left, right) - gl.where(b_last == col + 32 * half, 1.0, 0.0)
    b_kx = left - gl.where(b_last == col, 1.0, 0.0)
    left, right = load_columns(sS, C)
    return b_k, b_kx, gl.where(half == 0, left, right), left


# E7


@gluon.jit
def inverse16(D):
    """E7 of the four diagonal blocks `[4, 16, 16]`, a warp each, nothing leaves its registers: blocks of 2, 4, 8, 16.

    The transposed inverse is carried along: a transposed accumulator is what the right operand of the matrix units looks like.
    """
    i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, BLOCK)))[None, :][:, :, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(0, BLOCK)))[None, :][None, :, :]
    Dt = gl.convert_layout(gl.permute(D, (0, 2, 1)), BLOCK)
    one = gl.where(i == j, 1.0, 0.0)
    pair = (i ^ j) == 1
    M = one - gl.where(pair, D, 0.0)
    Mt = one - gl.where(pair, Dt, 0.0)
    zero = gl.zeros([4, 16, 16], gl.float32, BLOCK)
    for level in gl.static_range(1, 4):
        pick = ((i >> level) ^ (j >> level)) == 1
        A = gl.where(pick, D, 0.0).to(gl.float16)
        At = gl.where(pick, Dt, 0.0).to(gl.float16)
        Mh = M.to(gl.float16)
        Mth = Mt.to(gl.float16)
        P = mma_v2(gl.convert_layout(Mh, LEFT), gl.convert_layout(gl.permute(At, (0, 2, 1)), RIGHT), zero)
        M -= mma_v2(gl.convert_layout(P.to(gl.float16), LEFT), gl.convert_layout(gl.permute(Mth, (0, 2, 1)), RIGHT), zero)
        if level < 3:
            Pt = mma_v2(gl.convert_layout(Mth, LEFT), gl.convert_layout(gl.permute(A, (0, 2, 1)), RIGHT), zero)
            Mt -= mma_v2(gl.convert_layout(Pt.to(gl.float16), LEFT), gl.convert_layout(gl.permute(Mh, (0, 2, 1)), RIGHT), zero)
    return M


@gluon.jit
def inverse32(b_A, sE):
    """E7 of the two halves, `[half, row, column]`: two blocks of 16 each, [[M1, 0], [-M2 A21 M1, M2]], the product in the warp of the second."""
    b_A = gl.convert_layout(gl.reshape(gl.reshape(b_A, [C, 32]), [4, 16, 2, 16]), BLOCKS)
    i_b = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, BLOCKS))))[:, None][:, :, None][:, :, :, None]
    j_b = gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, BLOCKS))))[None, :][:, None, :], 3)
    own = (i_b & 1) == j_b
    b_D = gl.convert_layout(gl.sum(gl.where(own, b_A, 0.0), 2), BLOCK)
    b_left = gl.convert_layout(gl.sum(gl.where(own, 0.0, b_A), 2), BLOCK)  # of an odd diagonal block
    b_M = inverse16(b_D)
    b_Mh = b_M.to(gl.float16)
    sE.store(gl.reshape(b_Mh, [2, 2, 16, 16]))
    zero = gl.zeros([4, 16, 16], gl.float32, BLOCK)
    b_left = mma_v2(gl.convert_layout(b_Mh, LEFT), gl.convert_layout(b_left.to(gl.float16), RIGHT), zero)
    b_E = sE.slice(0, 1, dim=1).load(EARLIER) + gl.zeros([2, 2, 16, 16], gl.float16, EARLIER)
    b_left = mma_v2(gl.convert_layout(b_left.to(gl.float16), LEFT), gl.convert_layout(gl.reshape(b_E, [4, 16, 16]), RIGHT), zero)
    FLAT: gl.constexpr = gl.SliceLayout(2, BLOCKS)
    b_M = gl.convert_layout(b_M, FLAT)[:, :, None, :]
    b_left = gl.convert_layout(b_left, FLAT)[:, :, None, :]
    b_M = gl.where(own, b_M, gl.where((i_b & 1) == 1, -b_left, 0.0))
    return gl.convert_layout(gl.reshape(gl.reshape(b_M, [C, 32]), [2, 32, 32]), HALVES)


@gluon.jit
def load_beta(p_beta, beta_t, o_t, rows, BETA_RAW: gl.constexpr):
    """Of the tokens o_t, zero behind the sequence."""
    b_beta = gl.load(p_beta + gl.minimum(o_t, rows - 1) * beta_t).to(gl.float32)
    if BETA_RAW:
        b_beta = rcp(1.0 + ex2(-LOG2_E * b_beta))
    return gl.where(o_t < rows, b_beta, 0.0)


@gluon.jit
def tokens_of_halves(LAYOUT: gl.constexpr):
    """The token numbers `[2, 32]`."""
    return gl.arange(0, 2, gl.SliceLayout(1, LAYOUT))[:, None] * 32 + gl.arange(0, 32, gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def finish(
    k1, k2, kx, q1, q2, qx, sNear, sNorm, p_beta, beta_t, rows, p_k, p_g, p_bias, p_ke, k_t, g_t, inner, outer,
    GATE: gl.constexpr, L2NORM: gl.constexpr, BETA_RAW: gl.constexpr,
):  # fmt: skip
    """The q.k of E10 and E7, M beta: to memory. The six products `[64, 32]` hold row r of the chunk in row r."""
    half, row, col = half_row_col()
    b_A = gl.where(half == 0, by_halves(k1), by_halves(k2))
    b_Ax = by_halves(kx)
    b_square = gl.full([2, 32], 1.0, gl.float32, gl.SliceLayout(2, HALVES))
    if not L2NORM:
        b_square = gl.sum(gl.where(row == col, b_A, 0.0), 2)
    b_most = gl.max(gl.maximum(gl.where(row > col, b_A, 0.0), gl.where(half == 1, b_Ax, 0.0)), 2)
    sNear.store((b_most > NEAR * b_square).to(gl.int32))
    gl.thread_barrier()  # and no product reads its operands any more, whose memory is used again from here on
    repetitions = gl.sum(sNear._reinterpret(gl.int32, [C], LINE).load(PAIRS), 0)
    b_qk = gl.where(row >= col, gl.where(half == 0, by_halves(q1), by_halves(q2)), 0.0)
    b_qkx = by_halves(qx)
    beta_row = load_beta(p_beta, beta_t, tokens_of_halves(gl.SliceLayout(2, HALVES)), rows, BETA_RAW)[:, :, None]
    beta_col = load_beta(p_beta, beta_t, tokens_of_halves(gl.SliceLayout(1, HALVES)), rows, BETA_RAW)[:, None, :]
    beta_first = load_beta(p_beta, beta_t, gl.arange(0, 32, gl.SliceLayout(0, PRODUCT)), rows, BETA_RAW)[None, :]
    if repetitions * 8 >= rows:
        b_A, b_Ax, b_qk, b_qkx = without_repetitions(
            b_A, b_Ax, b_qk, b_qkx, b_square, beta_row, sNear, sNorm, p_k, p_g, p_bias, p_ke, k_t, g_t, rows, inner, outer, GATE
        )  # fmt: skip
    else:
        b_A = gl.where(row > col, b_A, 0.0) * beta_row
        b_Ax = b_Ax * beta_row

    SMALL: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    sM = gl.allocate_shared_memory(gl.float16, [C, 32], SMALL)
    sA = gl.allocate_shared_memory(gl.float16, [C, 32], SMALL)
    sE = gl.allocate_shared_memory(gl.float16, [2, 2, 16, 16], gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))
    sO = gl.allocate_shared_memory(gl.bfloat16, [C, 2 * C], TILE)
    sA.store(gl.reshape(b_Ax.to(gl.float16), [C, 32]))
    b_left = gl.where(half == 0, b_qk, b_qkx)
    sO.slice(0, C, dim=1).store(side_by_side(b_left.to(gl.bfloat16), gl.where(half == 0, 0.0, b_qk).to(gl.bfloat16)))
    b_M = inverse32(b_A, sE)  # E7
    sM.store(gl.reshape(b_M.to(gl.float16), [C, 32]))
    b_M = b_M * beta_col
    sO.slice(C, C, dim=1).store(side_by_side(gl.where(half == 0, b_M, 0.0).to(gl.bfloat16), gl.where(half == 0, 0.0, b_M).to(gl.bfloat16)))
    gl.thread_barrier()
    OP0: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    OP1: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, 2)
    zero = gl.zeros([32, 32], gl.float32, PRODUCT)
    b_T = mma_v2(sM.slice(32, 32, dim=0).load(OP0), sA.slice(32, 32, dim=0).load(OP1), zero)
    b_T = mma_v2(gl.convert_layout(b_T.to(gl.float16), OP0), sM.slice(0, 32, dim=0).load(OP1), zero)
    sO.slice(32, 32, dim=0).slice(C, 32, dim=1).store((-b_T * beta_first).to(gl.bfloat16))
    gl.thread_barrier()
    o_r = gl.arange(0, C, gl.SliceLayout(1, LINES))
    o_c = gl.arange(0, 2 * C, gl.SliceLayout(0, LINES))
    gl.store(p_ke + (o_r[:, None] + C) * K + o_c[None, :], sO.load(LINES))


@gluon.jit
def prefetch_ahead(p_q, p_k, p_g, q_t, k_t, g_t, left):
    """Brings 64 rows of each into the second cache, the last of the `left` ones again where there are no more."""
    o = gl.arange(0, 2 * C, VECTOR)
    o_r = gl.minimum(o // 2, left - 1)
    o_c = (o % 2) * BS
    for_q = (p_q + (o_r * q_t + o_c)).to(gl.int64)
    for_k = (p_k + (o_r * k_t + o_c)).to(gl.int64)
    for_g = (p_g + (o_r * g_t + o_c)).to(gl.int64)
    gl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; prefetch.global.L2 [$2]; prefetch.global.L2 [$3]; mov.b32 $0, 0; }",
        "=r,l,l,l", [for_q, for_k, for_g], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@kernel("p_q", "p_k", "p_g", "p_dt_bias", "p_o", own=["p_header", "p_tiles"], jit=gluon.jit)
def prepare_kernel(
    p_q, p_k, p_g, p_beta, p_A_log, p_dt_bias, p_cu, p_o, p_header, p_tiles, p_order,
    q_b: gl.int64, q_t: gl.int32, q_h: gl.int64, k_b: gl.int64, k_t: gl.int32, k_h: gl.int64, g_b: gl.int64, g_t: gl.int32, g_h: gl.int64,
    o_t: gl.int64, o_h: gl.int64, beta_b: gl.int64, beta_t: gl.int64, beta_h: gl.int64,
    N: gl.int32, T: gl.int32, H: gl.int32, HV: gl.int32, ahead: gl.int32, scale: gl.float32, lower_bound: gl.float32,
    GATE: gl.constexpr, L2NORM: gl.constexpr, BETA_RAW: gl.constexpr, MARK: gl.constexpr, ROLLED: gl.constexpr, PDL: gl.constexpr,
    UNIT: gl.constexpr,
):  # fmt: skip
    """E5 to E7, the decayed q and k, and the q.k of E10 of one chunk and head, into its record; the order of the sequences, longest first.

    Args:
        p_header, p_tiles: record unit * HV + h, that is `[records, 160]` fp32 and `[records * 256, 128]` bf16.
        p_order: `[N]` int32, or None; p_o: output whose padding is to be zeroed, or None. Without p_cu neither is touched.
        ahead: how many programs run at a time; one brings the inputs of that which will take its place into the second cache. 0: none does.
        MARK: a half may decay too widely; the mark, 1 or 0, says whether one does, and the tiles of a marked chunk are not to be used. Otherwise the
            mark is not written.
        ROLLED: the two slices of channels are a loop, which halves the code; else they are written out.
        PDL: the next kernel of the stream may start when all programs of this one have.
    """
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    pid = gl.program_id(0)
    i_h = pid % HV
    i_u = pid // HV
    record = (i_u * HV + i_h).to(gl.int64)
    p_header += record * HEADER
    p_tiles += record * (ROWS * K)
    if p_cu is not None:
        end = gl.load(p_cu + N).to(gl.int64)
        if p_order is not None:
            n = gl.num_programs(0) - 1 - pid  # the last units are often empty
            if n < N:
                rank_sequence(p_cu, p_order, n, N)
        if p_o is not None:
            if i_u * C + C > end:
                zero_padding(p_o + i_h * o_h * UNIT, o_t * UNIT, i_u * C, end, T)
        i_n = sequence_of(p_cu, N, i_u)
        i_b = 0
        i_c = i_u - first_unit(p_cu, i_n)
        start = gl.load(p_cu + i_n).to(gl.int64)
        rows = (gl.load(p_cu + i_n + 1).to(gl.int64) - start).to(gl.int32) - i_c * C
        start += i_c * C
    else:
        chunks = (T + C - 1) // C
        end = T
        i_b = i_u // chunks
        i_c = i_u % chunks
        start = (i_c * C).to(gl.int64)
        rows = T - i_c * C
    if rows <= 0:
        if MARK:
            gl.store(p_header + K, 0.0)
        return
    rows = gl.minimum(rows, C)
    share = HV // H
    i_hk = i_h // share
    q_t *= UNIT
    k_t *= UNIT
    g_t *= UNIT
    if ahead > 0:
        n_u = (pid + ahead) // HV
        n_h = (pid + ahead) % HV
        n_start = start + (n_u - i_u) * C
        left = end - n_start
        if left > 0:
            n_q = p_q + (i_b * q_b * UNIT + n_start * q_t + (n_h // share) * q_h * UNIT)
            n_k = p_k + (i_b * k_b * UNIT + n_start * k_t + (n_h // share) * k_h * UNIT)
            n_g = p_g + (i_b * g_b * UNIT + n_start * g_t + n_h * g_h * UNIT)
            prefetch_ahead(n_q, n_k, n_g, q_t, k_t, g_t, left.to(gl.int32))
    p_q += i_b * q_b * UNIT + start * q_t + i_hk * q_h * UNIT
    p_k += i_b * k_b * UNIT + start * k_t + i_hk * k_h * UNIT
    p_g += i_b * g_b * UNIT + start * g_t + i_h * g_h * UNIT
    p_beta += i_b * beta_b + start * beta_t + i_h * beta_h
    p_bias = p_dt_bias
    if p_bias is not None:
        p_bias += i_h * K

    i_t = gl.arange(0, 4, gl.SliceLayout(1, TOKENS))[:, None] * 16 + gl.arange(0, 4, gl.SliceLayout(0, TOKENS))[None, :] * TB
    o_c = gl.arange(0, BS, CHANNELS)[None, :][None, :, :]
    if ROLLED:
        prefetch_rows(p_g, g_t, rows)
    else:
        xs = load_rows(p_g, g_t, i_t, o_c, rows)
    prefetch_rows(p_g + BS, g_t, rows)
    a = 1.0
    if GATE != "none":
        a = ex2(gl.load(p_A_log + i_h).to(gl.float32) * LOG2_E)
    inner, outer = gate_factors(a, lower_bound, GATE)
    k_norms, q_norms = norms(p_k, p_q, k_t, q_t, i_t, o_c, rows, scale, L2NORM)

    sNear = gl.allocate_shared_memory(gl.int32, [2, 32], PLAIN)
    sNorm = gl.allocate_shared_memory(gl.float32, [TB, 4, 4], PLAIN)
    for i in gl.static_range(TB):
        sNorm.index(i).store(k_norms[i])
    sRk = gl.allocate_shared_memory(gl.bfloat16, [2, C, BS], TILE)
    sRq = gl.allocate_shared_memory(gl.bfloat16, [2, C, BS], TILE)
    sC = gl.allocate_shared_memory(gl.bfloat16, [2, C, BS], TILE)
    sX = gl.allocate_shared_memory(gl.bfloat16, [2, C, BS], TILE)
    b_widest = gl.zeros([1, BS], gl.float32, OWN)
    if ROLLED:
        for s in range(2):
            o_s = s * BS + o_c
            xs = load_rows(p_g, g_t, i_t, o_s, rows)
            b_widest = decay_slice(
                s, xs, p_k, p_q, p_bias, p_tiles, p_header, k_t, q_t, k_norms, q_norms, inner, outer, i_t, o_s, rows,
                sRk, sRq, sC, sX, b_widest, GATE,
            )  # fmt: skip
    else:
        for s in gl.static_range(2):
            if s > 0:
                xs = load_rows(p_g + s * BS, g_t, i_t, o_c, rows)
            b_widest = decay_slice(
                s, xs, p_k + s * BS, p_q + s * BS, p_bias, p_tiles + s * BS, p_header, k_t, q_t, k_norms, q_norms, inner, outer, i_t, o_c, rows,
                sRk, sRq, sC, sX, b_widest, GATE,
            )  # fmt: skip
    if MARK:
        gl.store(p_header + K, gl.where(gl.max(gl.max(b_widest, 1), 0) > WIDEST, 1.0, 0.0))
    fence_async_shared()
    gl.thread_barrier()
    zero = gl.zeros([C, 32], gl.float32, ACC)
    k1, k2, kx, q1, q2, qx = meet(sRk.index(0), sRq.index(0), sC.index(0), sX.index(0), zero, zero, zero, zero, zero, zero, True)
    k1, k2, kx, q1, q2, qx = meet(sRk.index(1), sRq.index(1), sC.index(1), sX.index(1), k1, k2, kx, q1, q2, qx, False)
    k1, k2, kx, q1, q2, qx = warpgroup_mma_wait(0, deps=(k1, k2, kx, q1, q2, qx))
    sRk._keep_alive()
    sRq._keep_alive()
    sC._keep_alive()
    sX._keep_alive()
    finish(
        k1, k2, kx, q1, q2, qx, sNear, sNorm, p_beta, beta_t, rows, p_k, p_g, p_bias, p_tiles + 2 * C * K, k_t, g_t, inner, outer,
        GATE, L2NORM, BETA_RAW,
    )  # fmt: skip
    sNear._keep_alive()
    sNorm._keep_alive()

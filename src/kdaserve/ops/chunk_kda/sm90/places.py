"""Which chunk a program of the Hopper prepare kernel works on, and what all programs share besides: the order of the sequences, and padding."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kdaserve.ops.chunk_kda.sm90.layouts import EVERY_WARP, LINES, PAIRS, C
from kdaserve.ops.chunk_kda.sm90.space import K

AT_ONCE = gl.constexpr(128)
"""Numbers in EVERY_WARP."""


@gluon.jit
def first_unit(p_cu, n):
    """The unit, that is chunk of a sequence, with which sequence n begins: there is room for all chunks before it, whatever the lengths."""
    return (gl.load(p_cu + n) // C).to(gl.int32) + n


@gluon.jit
def sequence_of(p_cu, N, unit):
    """The last sequence whose first unit is not behind `unit`: by bisection, at the end among `AT_ONCE` by counting, since ways to memory add up."""
    low = 0
    high = N
    while high - low > AT_ONCE:
        middle = (low + high) // 2
        if first_unit(p_cu, middle) <= unit:
            low = middle
        else:
            high = middle
    o_n = low + gl.arange(0, AT_ONCE, EVERY_WARP)
    m_n = o_n < high
    first = (gl.load(p_cu + o_n, mask=m_n, other=0) // C).to(gl.int32) + o_n
    return gl.maximum(low + gl.sum((m_n & (first <= unit)).to(gl.int32), 0) - 1, 0)


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
def side_jobs(p_cu, p_order, p_o, record, o_t, o_h, N, T, HV):
    """The order of the sequences and the zeros of the padding, shared among all programs."""
    if p_order is not None:
        n = gl.num_programs(0) - 1 - record  # the last records are often empty
        if n < N:
            rank_sequence(p_cu, p_order, n, N)
    if p_o is not None:
        end = gl.load(p_cu + N).to(gl.int32)
        first = record // HV * C
        if first + C > end:
            zero_padding(p_o + record % HV * o_h, o_t, first, end, T)


@gluon.jit
def chunk_of(p_cu, unit, N, T):
    """Of a unit the entry of the batch, the first token of its chunk in it, and how many there are: none, or less, where it has no chunk."""
    if p_cu is not None:
        i_n = sequence_of(p_cu, N, unit)
        i_b = 0
        start = gl.load(p_cu + i_n).to(gl.int32) + (unit - first_unit(p_cu, i_n)) * C
        rows = gl.load(p_cu + i_n + 1).to(gl.int32) - start
    else:
        chunks = (T + C - 1) // C
        i_b = unit // chunks
        start = unit % chunks * C
        rows = T - start
    return i_b, start, gl.minimum(rows, C)

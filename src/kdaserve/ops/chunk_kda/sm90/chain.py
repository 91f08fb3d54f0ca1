"""Prefill, second kernel, for Hopper: chunk after chunk through the state. One program a sequence, head and half of V.

K = V = 128. A program holds its 64 rows of the state in registers as two accumulators [64 (V), 64 (K)], the halves of K, so that the right operand
of every product is one tile [64, 64] of shared memory, and left operands (the state in bf16, r, v') never leave the registers. A warp of its own
brings chunks by TMA, `STAGES` of them in flight.

Records, as `prepare` writes them: `[records * 256, 128]` bf16, of each chunk and head 64 rows of kd (k decayed from the chunk's start), 64 of qd,
64 of ke (k decayed to the chunk's end), and 64 whose left half is the q.k of E10 and whose right half is M beta. Decays of the chunks:
`[records, 128]` fp32. Rows of kd, qd, M and q.k behind the end of the sequence must be finite, those of ke zero, and M and q.k have zeros
right of the diagonal. Records without a chunk are not read.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_init, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_wait

from kdaserve.ops.chunk_kda.sm90.layouts import BOX_ROWS, mask_rows
from kdaserve.ops.chunk_kda.sm90.space import RECORD, K
from kdaserve.ops.jit.launch import kernel
from kdaserve.ops.jit.states import ENTRIES, NEVER, C

R = gl.constexpr(64)
"""Rows of V of a program."""
STAGES = gl.constexpr(3)
CHUNK_BYTES = gl.constexpr(256 * 128 * 2 + 64 * 64 * 2 + 128 * 4)
"""What comes for a chunk: its record, its v, its decay."""
LINE = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
"""Of the decay of a chunk."""
STATE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
"""Of accumulators."""
LEFT = gl.constexpr(gl.DotOperandLayout(0, STATE.value, 2))
"""Of left operands."""
WORKER_REGISTERS = gl.constexpr(24)


@gluon.jit
def narrow(x):
    """X in bf16, two numbers an instruction; what `to` becomes where the result is used twice goes through a slow unit."""
    return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=False, pack=2)


@gluon.jit
def rest(x, high):
    """What `narrow` leaves of x, in bf16."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b;
        .reg .f32 c, d;
        shl.b32 a, $3, 16;
        and.b32 b, $3, 0xffff0000;
        mov.b32 c, a;
        mov.b32 d, b;
        sub.rn.f32 c, $1, c;
        sub.rn.f32 d, $2, d;
        cvt.rn.bf16x2.f32 $0, d, c;
        }""", "=r,f,f,r", [x, high], dtype=gl.bfloat16, is_pure=False, pack=2)  # fmt: skip


@gluon.jit
def wide(x):
    """X in fp32."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            shl.b32 a, $2, 16;
            and.b32 b, $2, 0xffff0000;
            mov.b32 $0, a;
            mov.b32 $1, b;
            }""", "=f,=f,r", [x], dtype=gl.float32, is_pure=False, pack=2)  # fmt: skip
    else:
        return x.to(gl.float32)


@gluon.jit
def difference(x, y):
    """X - y in bf16."""
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 c, d;
        sub.rn.f32 c, $1, $3;
        sub.rn.f32 d, $2, $4;
        cvt.rn.bf16x2.f32 $0, d, c;
        }""", "=r,f,f,f,f", [x, y], dtype=gl.bfloat16, is_pure=False, pack=2)  # fmt: skip


@gluon.jit
def times(x, y):
    """X y, here: the compiler would move the products behind a wait, where nothing hides them."""
    return gl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def output(x, DTYPE: gl.constexpr):
    """X as it is written to o."""
    if DTYPE == gl.bfloat16:
        return narrow(x)
    else:
        return x.to(DTYPE)


@gluon.jit
def operand(x):
    """X as a left operand in bf16; it is where it must be."""
    return gl.convert_layout(x, LEFT, assert_trivial=True)


@gluon.jit
def save(p, b_S0, b_S1, o_S):
    """Stores the rows of a state at offsets o_S of its left half."""
    gl.store(p + o_S, b_S0.to(p.dtype.element_ty))
    gl.store(p + o_S + K // 2, b_S1.to(p.dtype.element_ty))


@gluon.jit
def save_snapshots(b_S0, b_S1, boundary, i_n, o_S, p_pool, pool_s, p_sequence, p_tokens, p_slot, M):
    """As `kdaserve.ops.jit.states.save_snapshots`."""
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i_next = gl.to_tensor(NEVER)
    for i_m in range(0, M, ENTRIES):
        o_m = i_m + gl.arange(0, ENTRIES, layout=FLAT)
        m_m = o_m < M
        b_slot = gl.load(p_slot + o_m, mask=m_m, other=-1).to(gl.int64)
        b_boundary = ((gl.load(p_tokens + o_m, mask=m_m, other=0) + (C - 1)) // C).to(gl.int32)
        m_mine = (gl.load(p_sequence + o_m, mask=m_m, other=-1) == i_n) & (b_slot >= 0)
        i_next = gl.minimum(i_next, gl.min(gl.where(m_mine & (b_boundary > boundary), b_boundary, NEVER), 0))
        b_hit = gl.where(m_mine & (b_boundary == boundary), b_slot, -1)
        slot = gl.max(b_hit, 0)
        while slot >= 0:
            save(p_pool + slot * pool_s, b_S0, b_S1, o_S)
            b_hit = gl.where(b_hit < slot, b_hit, -1)
            slot = gl.max(b_hit, 0)
    return i_next


@gluon.jit
def produce(d_tiles, d_decay, d_v, record, token, column, chunks, HV, sBoxes, sV, sDecay, full, empty):
    """The warp that fills the stages as they become free."""
    gdc_wait()
    stage = 0
    phase = 1
    for _ in range(chunks):
        mbarrier.wait(empty.index(stage), phase)
        bar = full.index(stage)
        mbarrier.expect(bar, CHUNK_BYTES)
        tma.async_copy_global_to_shared(d_tiles, [record * RECORD, 0], bar, sBoxes.index(stage * 2))
        tma.async_copy_global_to_shared(d_tiles, [record * RECORD, 64], bar, sBoxes.index(stage * 2 + 1))
        tma.async_copy_global_to_shared(d_v, [token, column], bar, sV.index(stage))
        tma.async_copy_global_to_shared(d_decay, [record, 0], bar, sDecay.index(stage))
        record += HV
        token += C
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def store_rows(p_o, o_t, sO, left):
    """Writes the first `left` rows of a tile, where whole ones would reach into the next sequence."""
    o_c = gl.arange(0, C, layout=gl.SliceLayout(1, BOX_ROWS))[:, None]
    o_v = gl.arange(0, R, layout=gl.SliceLayout(0, BOX_ROWS))[None, :]
    gl.store(p_o + o_c * o_t + o_v, sO.load(BOX_ROWS), mask=(o_c < left) & (o_v >= 0))


@gluon.jit
def consume(
    d_o, p_o, p_pool, p_index, p_h, p_chunk_offsets, p_track, p_track_chunk, p_sequence, p_tokens, p_slot,
    o_token, column, length, chunks, behind, i_n, i_h, i_v, pool_s, track_s, o_t, HV, M, sBoxes, sV, sDecay, sO, full, empty,
    SOON: gl.constexpr,
):  # fmt: skip
    """The warps that compute: E8 to E11 of all chunks of a sequence.

    The assembler counts products in flight within a block of code only. So rare branches and the wait for a chunk stand first in the loop, then all
    products of the chunk before are waited for, and what follows is one block.
    """
    sTiles = sBoxes._reinterpret(gl.bfloat16, [STAGES * 8, C, 64], sBoxes.layout)  # of a stage kd, qd, ke left, q.k, kd, qd, ke right, M beta
    sHalves = sDecay._reinterpret(gl.float32, [STAGES * 2, K // 2], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    o_S = (i_v * R + gl.arange(0, R, layout=gl.SliceLayout(1, STATE)))[:, None] * K + gl.arange(0, K // 2, layout=gl.SliceLayout(0, STATE))[None, :]
    slot = gl.load(p_index + i_n).to(gl.int64)
    p_pool += i_h * (K * K)
    b_S0 = gl.zeros([R, K // 2], gl.float32, STATE)
    b_S1 = gl.zeros([R, K // 2], gl.float32, STATE)
    if slot >= 0:
        b_S0 = gl.load(p_pool + slot * pool_s + o_S).to(gl.float32)
        b_S1 = gl.load(p_pool + slot * pool_s + o_S + K // 2).to(gl.float32)
    if p_h is not None:
        p_h += (gl.load(p_chunk_offsets + i_n).to(gl.int64) * HV + i_h) * (K * K)
    i_track = gl.to_tensor(-1)
    if p_track is not None:
        i_track = gl.load(p_track_chunk + i_n).to(gl.int32)
        p_track += i_n.to(gl.int64) * track_s + i_h * (K * K)
    i_snapshot = gl.to_tensor(NEVER)
    if p_slot is not None:
        i_snapshot = save_snapshots(b_S0, b_S1, -1, i_n, o_S, p_pool, pool_s, p_sequence, p_tokens, p_slot, M)
    stage = 0
    phase = 0
    before = 0
    b_P = gl.zeros([R, C], gl.float32, STATE)
    b_o = warpgroup_mma_init(gl.zeros([R, C], gl.float32, STATE))
    for i_c in range(chunks):
        if p_track is not None:
            if i_c == i_track:
                warpgroup_mma_wait(0, deps=[b_o])
                save(p_track, b_S0, b_S1, o_S)
        if p_slot is not None:
            if i_c == i_snapshot:
                warpgroup_mma_wait(0, deps=[b_o])
                i_snapshot = save_snapshots(b_S0, b_S1, i_c, i_n, o_S, p_pool, pool_s, p_sequence, p_tokens, p_slot, M)
        mbarrier.wait(full.index(stage), phase)
        left = length - i_c * C
        if left < C:
            mask_rows(sV.index(stage), left)
        tile = stage * 8
        if SOON:
            b_v = sV.index(stage).permute([1, 0]).load(STATE)
            b_decay = sHalves.index(stage * 2).load(gl.SliceLayout(0, STATE))
        b_out = warpgroup_mma_wait(0, deps=[b_o])  # of the chunk before
        b_A0 = operand(narrow(b_S0))
        b_A1 = operand(narrow(b_S1))
        # E8, with E9 put around it: w and u are never formed. The first half of S q runs while r is computed.
        b_P = warpgroup_mma(b_A0, sTiles.index(tile).permute([1, 0]), b_P, use_acc=False, is_async=True)
        b_P = warpgroup_mma(b_A1, sTiles.index(tile + 4).permute([1, 0]), b_P, is_async=True)
        if p_h is not None:
            save(p_h, b_S0, b_S1, o_S)
            p_h += HV * (K * K)
        h_out = output(b_out, sO.dtype)
        b_o = warpgroup_mma(b_A0, sTiles.index(tile + 1).permute([1, 0]), b_out, use_acc=False, is_async=True)  # E10
        if not SOON:
            b_v = sV.index(stage).permute([1, 0]).load(STATE)
            b_decay = sHalves.index(stage * 2).load(gl.SliceLayout(0, STATE))
        b_v = wide(b_v)
        b_S0 = times(b_S0, b_decay[None, :])
        b_P = warpgroup_mma_wait(1, deps=[b_P])
        b_r = operand(difference(b_v, b_P))
        b_P = warpgroup_mma(b_r, sTiles.index(tile + 7).permute([1, 0]), b_P, use_acc=False, is_async=True)  # E9
        b_o = warpgroup_mma(b_A1, sTiles.index(tile + 5).permute([1, 0]), b_o, is_async=True)
        b_S1 = times(b_S1, sHalves.index(stage * 2 + 1).load(gl.SliceLayout(0, STATE))[None, :])
        b_P = warpgroup_mma_wait(1, deps=[b_P])
        # v' as two bf16 numbers.
        b_narrow = narrow(b_P)
        b_high = operand(b_narrow)
        b_S0 = warpgroup_mma(b_high, sTiles.index(tile + 2), b_S0, is_async=True)  # E11
        b_S1 = warpgroup_mma(b_high, sTiles.index(tile + 6), b_S1, is_async=True)
        b_low = operand(rest(b_P, b_narrow))
        b_S0 = warpgroup_mma(b_low, sTiles.index(tile + 2), b_S0, is_async=True)
        b_S1 = warpgroup_mma(b_low, sTiles.index(tile + 6), b_S1, is_async=True)
        b_o = warpgroup_mma(b_high, sTiles.index(tile + 3).permute([1, 0]), b_o, is_async=True)
        b_o = warpgroup_mma(b_low, sTiles.index(tile + 3).permute([1, 0]), b_o, is_async=True)
        # The output of the chunk before; before the first chunk it goes to rows that are not there. The matrix units are busy for longer than this.
        tma.store_wait(0)
        gl.thread_barrier()
        mbarrier.arrive(empty.index(before), count=1, pred=i_c > 0)
        sO.permute([1, 0]).store(h_out)
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(d_o, [gl.where(i_c > 0, o_token + (i_c - 1) * C, behind), column], sO)
        b_S0, b_S1 = warpgroup_mma_wait(2, deps=[b_S0, b_S1])
        before = stage
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    b_out = warpgroup_mma_wait(0, deps=[b_o])
    tma.store_wait(0)
    if chunks > 0:
        gl.thread_barrier()
        sO.permute([1, 0]).store(output(b_out, sO.dtype))
        gl.thread_barrier()
        i_c = chunks - 1
        store_rows(p_o + (o_token + i_c * C).to(gl.int64) * o_t + column, o_t, sO, length - i_c * C)
    if p_slot is not None:
        if chunks == i_snapshot:
            save_snapshots(b_S0, b_S1, chunks, i_n, o_S, p_pool, pool_s, p_sequence, p_tokens, p_slot, M)
    if (slot >= 0) & (length > 0):
        save(p_pool + slot * pool_s, b_S0, b_S1, o_S)
    gdc_wait()  # so that no program, and no call, ends before `prepare` does


@kernel("p_o", "p_pool", "p_track", own=["p_h"], jit=gluon.jit)
def chain_kernel(
    d_tiles, d_decay, d_v, d_o, p_o, p_pool, p_index, p_cu, p_order, p_h, p_chunk_offsets, p_track, p_track_chunk, p_sequence, p_tokens, p_slot,
    o_t: gl.int64, o_h: gl.int32, pool_s: gl.int64, track_s: gl.int64,
    v_b: gl.int32, v_h: gl.int32, o_b: gl.int32, behind: gl.int32, T: gl.int32, HV: gl.int32, M: gl.int32,
    SOON: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """E8 to E11 of all chunks of a sequence, the output written on the way, and the states at the boundaries that the call asks for.

    Token t of batch entry b is row b v_b + t of `d_v`, head h starts at column h v_h; likewise `d_o`. Row `behind` is past the end of `d_o`.

    The kernel may be launched while `prepare` still runs, and waits for it before it reads records, decays and `p_order`, which alone come from
    there. States it reads before: `prepare` itself is launched the usual way, after all that came before it in the stream has ended, and all
    programs of this kernel are behind that start.

    Args:
        p_order: `[N]`, the sequence of the first program, of the second, ...: the longest first where not all run at once. None = as they come.
        SOON: v and decay are loaded before the first products are started; else behind them, which takes fewer registers.
    """
    pid = gl.program_id(0)
    i_v = pid % (K // R)
    i_h = pid // (K // R) % HV
    i_n = pid // (K // R) // HV
    if p_order is not None:
        gdc_wait()
        i_n = gl.load(p_order + i_n).to(gl.int32)
    if p_cu is not None:
        v_token = gl.load(p_cu + i_n).to(gl.int32)
        length = gl.load(p_cu + i_n + 1).to(gl.int32) - v_token
        o_token = v_token
        unit = v_token // C + i_n
    else:
        length = T
        v_token = i_n * v_b
        o_token = i_n * o_b
        unit = i_n * ((T + (C - 1)) // C)
    chunks = (length + (C - 1)) // C
    record = unit * HV + i_h
    sBoxes = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, RECORD, 64], d_tiles.layout)
    sV = gl.allocate_shared_memory(d_v.dtype, [STAGES, C, R], d_v.layout)
    sO = gl.allocate_shared_memory(d_o.dtype, [C, R], d_o.layout)
    sDecay = gl.allocate_shared_memory(gl.float32, [STAGES, 1, K], d_decay.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (consume, (
                d_o, p_o, p_pool, p_index, p_h, p_chunk_offsets, p_track, p_track_chunk, p_sequence, p_tokens, p_slot,
                o_token, i_h * (o_h * UNIT) + i_v * R, length, chunks, behind, i_n, i_h, i_v, pool_s * UNIT, track_s * UNIT, o_t * UNIT, HV, M,
                sBoxes, sV, sDecay, sO, full, empty, SOON,
            )),
            (produce, (d_tiles, d_decay, d_v, record, v_token, i_h * v_h + i_v * R, chunks, HV, sBoxes, sV, sDecay, full, empty)),
        ],
        [1],
        [WORKER_REGISTERS],
    )  # fmt: skip

"""Every form of the kernels that a rule or a table can choose, against the float64 recurrence: slices and tiles, dimensions, dtypes, gates, memory
that no vector load can read. A row is one or two compilations."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from conftest import Call, Target
from gpu import DATA, STRONG, decay_in_places, results
from helpers import DECODE, NAN
from kdaserve.testing import assert_same_bits, decode_inputs, prefill_inputs
from test_pool_semantics import spread
from test_prefill_semantics import observed

pytest.importorskip("triton")

from kdaserve.ops.chunk_kda.triton import config
from kdaserve.ops.jit import chunking
from kdaserve.ops.packed_decode_kda.triton import TILES

pytestmark = pytest.mark.gpu

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
LENGTHS = [130, 0, 65, 3]


class Form(NamedTuple):
    """What kernels are compiled for. `gate` "wide" is a bounded gate whose lower bound is beyond what one pass can take."""

    K: int
    V: int
    dtype: torch.dtype
    pool: torch.dtype
    gate: str
    normed: bool = True
    aligned: bool = True

    def __str__(self) -> str:
        names = {FP32: "fp32", BF16: "bf16", FP16: "fp16"}
        extras = ("" if self.normed else "-no-norm") + ("" if self.aligned else "-misaligned")
        return f"{self.K}x{self.V}-{names[self.dtype]}-{names[self.pool]}-{self.gate}{extras}"

    @property
    def sizes(self) -> dict[str, Any]:
        """Options of `prefill_inputs` and `decode_inputs`."""
        return {"k_dim": self.K, "v_dim": self.V, "dtype": self.dtype, "pool_dtype": self.pool}

    def changed(self, call: Call) -> Call:
        """A prefill call of these sizes with this norm, bound and memory."""
        if self.gate == "wide":
            call["lower_bound"] = -20.0
        if not self.normed:  # |k| near 1, or the recurrence itself grows
            call |= {"k": call["k"] * self.K**-0.5, "use_qk_l2norm_in_kernel": False}
        return call if self.aligned else call | moved(call, (*DATA, "dt_bias"), ("initial_state", "track_state"))


PREFILL_FORMS = (
    Form(16, 16, BF16, FP32, "none"),
    Form(16, 256, BF16, BF16, "bounded"),
    Form(256, 16, FP16, FP32, "softplus"),
    Form(48, 48, FP32, FP32, "softplus"),
    Form(48, 192, BF16, FP16, "wide"),
    Form(64, 64, FP32, BF16, "none"),
    Form(64, 64, BF16, FP32, "softplus", normed=False),
    Form(64, 128, FP16, FP16, "bounded"),
    Form(64, 256, FP16, BF16, "none", normed=False),
    Form(128, 48, FP16, FP32, "wide"),
    Form(128, 64, BF16, FP32, "bounded", aligned=False),
    Form(128, 128, BF16, BF16, "softplus"),
    Form(128, 128, FP32, FP16, "bounded", normed=False),
    Form(192, 64, BF16, FP32, "bounded", normed=False),
    Form(192, 192, FP32, FP32, "wide", aligned=False),
    Form(256, 128, BF16, FP32, "none", aligned=False),
    Form(256, 256, BF16, FP32, "softplus"),
    Form(256, 256, FP32, FP32, "bounded"),
)
RECURRENT_FORMS = (
    Form(16, 256, FP16, FP32, "softplus"),
    Form(48, 48, BF16, BF16, "none"),
    Form(128, 128, BF16, FP32, "bounded"),
    Form(192, 64, FP32, FP16, "softplus", aligned=False),
    Form(256, 256, BF16, FP32, "bounded", normed=False),
)
DECODE_FORMS = (
    Form(16, 48, FP16, FP32, "softplus"),
    Form(48, 16, FP32, BF16, "bounded"),
    Form(64, 192, BF16, FP32, "bounded", aligned=False),
    Form(128, 128, BF16, FP32, "bounded"),
    Form(128, 128, BF16, BF16, "softplus"),
    Form(192, 64, FP16, FP16, "bounded", aligned=False),
    Form(256, 256, BF16, FP32, "softplus"),
)


def moved(call: Call, rows: tuple[str, ...], pools: tuple[str, ...]) -> Call:
    """Tensors of a call one element off in memory, with a NaN between any two rows."""

    def row(x: Tensor) -> Tensor:
        buffer = torch.full((*x.shape[:-1], x.shape[-1] + 1), NAN, dtype=x.dtype, device=x.device)
        buffer[..., 1:] = x
        return buffer[..., 1:]

    return {n: row(call[n]) for n in rows if call.get(n) is not None} | {n: spread(call[n], gap=37)[1] for n in pools if call.get(n) is not None}


def prefill_of(form: Form, device: str, seed: int) -> Call:
    """Any gate's ordinary decays with seed 0, else some that no exponent of fp32 holds beside others near 1."""
    gate = "bounded" if form.gate == "wide" else form.gate
    call = observed(LENGTHS, gate=gate, v_heads=4, beta_is_raw=gate != "none", device=device, seed=seed, **form.sizes)
    if seed:
        call["g"] = decay_in_places(call["g"], gate)
    return form.changed(call)


@pytest.mark.parametrize("form", PREFILL_FORMS, ids=str)
def test_forms_of_chunk_kda(serving_target: Target, form: Form):
    for seed in (0, 1):
        serving_target.check_prefill("chunk_kda", prefill_of(form, serving_target.device, seed))


@pytest.mark.parametrize("form", RECURRENT_FORMS, ids=str)
def test_forms_of_recurrent_kda(serving_target: Target, form: Form):
    for seed in (0, 1):
        serving_target.check_prefill("recurrent_kda", prefill_of(form, serving_target.device, seed))


# By the number of sequences and heads

HEADS, DIM = 2, 128


def sequences_of(chain: chunking.Chain, dtype: torch.dtype, saves: bool, device: str) -> int:
    """The least number of sequences of `HEADS` heads for which the rule takes a slice of V like this one."""
    products = config.operands(dtype, True)
    processors, memory = chunking.processor(torch.device(device))
    chosen = (chunking.chain(n * HEADS, DIM, DIM, products.dtype, saves, processors, memory) for n in range(1, 1000))
    return next(n for n, form in enumerate(chosen, 1) if (form.slice, form.transposed) == (chain.slice, chain.transposed))


def several(sequences: int, dtype: torch.dtype, device: str, saves: bool) -> Call:
    lengths = [130, *((29 * n) % 71 for n in range(1, sequences))]
    make = observed if saves else prefill_inputs
    return make(lengths, heads=HEADS, k_dim=DIM, v_dim=DIM, dtype=dtype, device=device)


FORMS = [(BF16, form) for form in chunking.CHAINS] + [(FP32, chunking.ALONE)]


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize(("dtype", "chain"), FORMS, ids=lambda x: f"slice{x.slice}" if isinstance(x, chunking.Chain) else str(x))
def test_every_chain(serving_target: Target, chain: chunking.Chain, dtype: torch.dtype, saves: bool):
    sequences = sequences_of(chain, dtype, saves, serving_target.device)
    serving_target.check_prefill("chunk_kda", several(sequences, dtype, serving_target.device, saves))


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_every_chain_gives_the_same_bits(serving_target: Target, dtype: torch.dtype):
    """S10: how many sequences there are beside one decides how its state is cut, and must not show."""
    counts = sorted({1, 70, *(sequences_of(chain, chosen, False, serving_target.device) for chosen, chain in FORMS if chosen == dtype)})
    whole = several(counts[-1], dtype, serving_target.device, saves=False)
    expected = results(serving_target, "chunk_kda", whole)
    for sequences in counts[:-1]:
        tokens = int(whole["cu_seqlens"][sequences])
        part = whole | {name: whole[name][:, :tokens] for name in DATA}
        part |= {"cu_seqlens": whole["cu_seqlens"][: sequences + 1], "initial_state_indices": whole["initial_state_indices"][:sequences]}
        found = results(serving_target, "chunk_kda", part)
        slots = part["initial_state_indices"].long()
        serving_target.assert_same(found["output"], expected["output"][:, :tokens], f"output of {sequences} of {counts[-1]} sequences")
        serving_target.assert_same(found["initial_state"][slots], expected["initial_state"][slots], f"states of {sequences} sequences")


def decode_of(form: Form, batch: int, device: str) -> Call:
    call = decode_inputs(batch, heads=2, v_heads=4, lower_bound=None if form.gate == "softplus" else -5.0, device=device, **form.sizes)
    call["ssm_state_indices"][batch // 2] = -1
    call["a"][0, ::2] = STRONG[form.gate]
    return call if form.aligned else call | moved(call, ("mixed_qkv", "a", "b", "dt_bias", "out"), ("initial_state",))


def batches() -> list[int]:
    """Requests of four heads, as many as a tile is for."""
    return [most // 4 if most < 2**31 else TILES[i - 1][0] // 4 + 1 for i, (most, *_) in enumerate(TILES)]


@pytest.mark.parametrize("batch", batches())
@pytest.mark.parametrize("form", DECODE_FORMS, ids=str)
def test_forms_of_decode(serving_target: Target, form: Form, batch: int):
    serving_target.check_decode(decode_of(form, batch, serving_target.device))


@pytest.mark.parametrize("form", [form for form in DECODE_FORMS if form.K >= 128], ids=str)
def test_every_tile_gives_the_same_bits(serving_target: Target, form: Form):
    """S10, as above."""
    counts = sorted(batches())
    whole = decode_of(form, counts[-1], serving_target.device)
    expected = results(serving_target, DECODE, whole)
    for batch in counts[:-1]:
        part = whole | {name: whole[name][:batch] for name in ("mixed_qkv", "a", "b", "ssm_state_indices", "out")}
        found = results(serving_target, DECODE, part)
        used = part["ssm_state_indices"][part["ssm_state_indices"] >= 0].long()
        assert_same_bits(found["output"], expected["output"][:batch], f"output of {batch} of {counts[-1]} requests")
        assert_same_bits(found["initial_state"][used], expected["initial_state"][used], f"states of {batch} requests")

"""Random calls of every shape the contract allows, against the float64 recurrence."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import Call, Target
from kdaserve import Snapshots, plan_prefill
from kdaserve.testing import assert_same_bits, decode_inputs, prefill_inputs
from test_pool_semantics import spread, with_tail

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DIMS = (16, 32, 48)


Form = tuple[dict[str, Any], bool, int]
"""What kernels are compiled for: options of `prefill_inputs`, whether `h` is asked for, how many elements lie between slots and rows of the gate."""
ANY = st.tuples(
    st.fixed_dictionaries(
        {
            "k_dim": st.sampled_from(DIMS),
            "v_dim": st.sampled_from(DIMS),
            "dtype": st.sampled_from(DTYPES),
            "pool_dtype": st.sampled_from(DTYPES),
            "gate": st.sampled_from(["bounded", "softplus", "none"]),
            "beta_is_raw": st.booleans(),
            "batched": st.booleans(),
        }
    ),
    st.booleans(),
    st.integers(0, 9),
)
FEW = st.sampled_from(
    [
        ({"k_dim": 16, "v_dim": 48, "pool_dtype": torch.bfloat16, "gate": "softplus", "beta_is_raw": True, "batched": False}, True, 3),
        ({"k_dim": 32, "v_dim": 32, "dtype": torch.bfloat16, "batched": True}, False, 0),
        ({"k_dim": 48, "v_dim": 16, "dtype": torch.float16, "pool_dtype": torch.float16, "gate": "none", "batched": False}, False, 8),
    ]
)
"""Where each takes a compiler seconds; `test_gpu_forms` has the others."""


@st.composite
def prefills(draw: st.DrawFn, forms: st.SearchStrategy[Form]) -> tuple[Call, int, int]:
    """A call on the CPU, how many padding rows it has, and how many elements lie between its slots."""
    options, h, gap = draw(forms)
    if options["batched"]:
        lengths = [draw(st.integers(1, 140))] * draw(st.integers(1, 4))
    else:
        lengths = draw(st.lists(st.integers(0, 3) | st.integers(0, 200) | st.sampled_from([0, 63, 64, 65, 128]), max_size=5))
    heads, slots = draw(st.integers(1, 3)), 2 * len(lengths) + 6
    call = prefill_inputs(
        lengths,
        heads=heads,
        v_heads=heads * draw(st.integers(1, 3)),
        slots=slots,
        seed=draw(st.integers(0, 99)),
        **options,
    )
    padded = draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    rows = draw(st.permutations(range(slots)))
    call["initial_state_indices"] = torch.tensor([-1 if pad else row for pad, row in zip(padded, rows, strict=False)], dtype=torch.int64)
    cuts = [(n, t) for n, length in enumerate(lengths) for t in sorted({*range(0, length + 1, 64), length})]
    saved = draw(st.lists(st.sampled_from(cuts), max_size=4)) if cuts else []
    call["snapshots"] = Snapshots([n for n, _ in saved], [t for _, t in saved], rows[len(lengths) : len(lengths) + len(saved)])
    call["track_chunk_idx"] = torch.tensor([draw(st.integers(-1, (length - 1) // 64)) for length in lengths], dtype=torch.int64)
    call["track_state"] = torch.full((len(lengths), *call["initial_state"].shape[1:]), torch.nan)
    call["output_intermediate_states"] = h
    if draw(st.booleans()):
        call["plan"] = plan_prefill(lengths=lengths)
    return call, 0 if options["batched"] else draw(st.integers(0, 9)), gap


def on(device: str, call: Call) -> Call:
    moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    if call.get("plan") is not None:
        moved["plan"] = plan_prefill(lengths=call["plan"].lengths, device=device)
    return moved


@given(data=st.data())
def test_any_prefill(target: Target, op: str, data: st.DataObject):
    call, padding, gap = data.draw(prefills(FEW if target.compiles else ANY))
    call = on(target.device, call)
    for name in ("q", "k", "v", "g", "beta"):
        call[name] = with_tail(call[name], padding)
    call["g"], call["beta"] = with_tail(call["g"], gap), with_tail(call["beta"], padding)
    used = {*call["initial_state_indices"].tolist(), *call["snapshots"].slot.tolist()}
    buffer, call["initial_state"] = spread(call["initial_state"], gap)
    for slot in range(len(call["initial_state"])):
        if slot not in used:
            call["initial_state"][slot] = torch.nan
    before, rows = buffer.clone(), call["initial_state"].clone()
    target.check_prefill(op, call)
    call["initial_state"].copy_(rows)
    assert_same_bits(buffer, before, f"{target}: bytes between the slots")


@given(data=st.data())
def test_any_decode(target: Target, data: st.DataObject):
    batch, heads = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 3))
    call = decode_inputs(
        batch,
        heads=heads,
        v_heads=heads * data.draw(st.integers(1, 3)),
        k_dim=data.draw(st.sampled_from(DIMS)),
        v_dim=data.draw(st.sampled_from(DIMS)),
        dtype=data.draw(st.sampled_from(DTYPES)),
        pool_dtype=data.draw(st.sampled_from(DTYPES)),
        lower_bound=data.draw(st.sampled_from([-5.0, -0.1, None])),
        seed=data.draw(st.integers(0, 99)),
        device=target.device,
    )
    padding = torch.tensor(data.draw(st.lists(st.booleans(), min_size=batch, max_size=batch)), dtype=torch.bool, device=target.device)
    call["ssm_state_indices"][padding] = -1
    for name in ("mixed_qkv", "a", "b"):
        call[name][padding] = torch.nan
    target.check_decode(call)

"""Every guard: True for a call in order, False for each way to break it, never an exception."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kdaserve
from kdaserve import guards
from kdaserve.testing import decode_inputs, prefill_inputs

GUARDS: dict[str, Callable[..., bool]] = {
    name: f for name, f in inspect.getmembers(guards, inspect.isfunction) if f.__module__ == guards.__name__ and not name.startswith("_")
}
X = torch.zeros(4, 6)
META = torch.zeros(4, 6, device="meta")
LEAF = torch.zeros(2, requires_grad=True)
RESIZED = torch.zeros(2)
RESIZED.untyped_storage().resize_(0)


def poisoned(value: float) -> torch.Tensor:
    """Zeros with one entry that is `value`."""
    x = torch.zeros(3, 5)
    x[2, 4] = value
    return x


def rows(*counts: int) -> list[torch.Tensor]:
    """q, g and beta of so many rows."""
    T, T_g, T_beta = counts
    return [torch.zeros(1, T, 2, 16), torch.zeros(1, T_g, 2, 16), torch.zeros(1, T_beta, 2)]


def shapes(**changed: torch.Tensor) -> list[torch.Tensor]:
    """q, k, v, g, beta and pool of a grouped call whose sizes all differ, with some of them `changed`."""
    call = prefill_inputs(lengths=[7], heads=2, v_heads=4, k_dim=16, v_dim=32) | changed
    return [call[name] for name in ("q", "k", "v", "g", "beta", "initial_state")]


# guard: (arguments for which it is True, arguments for which it is False)
CASES: dict[str, tuple[list[tuple], list[tuple]]] = {
    "is_tensor": ([(X,), (X, META)], [(None,), (X, [0])]),
    "is_one_of": ([("a", ("a", "b")), ("a", {"a": 1})], [("c", ("a", "b")), (None, ("a",)), (True, ("a",))]),
    "is_finite_number": ([(0,), (-1.5,)], [(float("nan"),), (float("inf"),), (True,), ("1",), (None,), (X,)]),
    "has_ndim": ([(X, 2)], [(X, 3), (None, 2)]),
    "has_dtype": ([(X, torch.float32), (X, torch.int32, torch.float32)], [(X, torch.float64), (None, torch.float32)]),
    "same_dtype": ([(X, X, META), (X,)], [(X, X, X.double()), (X, None)]),
    "same_device": ([(X, X.int()), (META, META)], [(X, META), (X, None)]),
    "has_storage": ([(X, X), (X[:0],)], [(X, META), (None,), (RESIZED,)]),
    "last_dim_contiguous": (
        [(X,), (X[:, :3], X[::2]), (torch.zeros(3, 8)[:, ::2][:, :1],)],
        [(X.T,), (X, X[:, ::2]), (None,), (torch.zeros(()),)],
    ),
    "pool_is_indexed": ([(torch.zeros(4, 2, 16, 16), torch.tensor([0]))], [(None, X), (X, None), (X, [0])]),
    "gates_cover_q": ([(*rows(51, 51, 51),), (*rows(51, 64, 64),)], [(*rows(51, 50, 51),), (*rows(51, 51, 40),), (X, None, X)]),
    "prefill_shapes_agree": (
        [(*shapes(),), (*shapes(g=torch.zeros(1, 9, 4, 16), beta=torch.zeros(1, 9, 4)),)],
        [
            (*shapes(k=torch.zeros(1, 7, 4, 16)),),
            (*shapes(v=torch.zeros(1, 6, 4, 32)),),
            (*shapes(g=torch.zeros(1, 7, 2, 16)),),
            (*shapes(g=torch.zeros(1, 6, 4, 16)),),
            (*shapes(beta=torch.zeros(1, 7, 2)),),
            (*shapes(beta=torch.zeros(2, 7, 4)),),
            (*shapes(initial_state=torch.zeros(8, 4, 16, 32)),),
            (*shapes(initial_state=torch.zeros(8, 2, 32, 16)),),
            (X, X, X, X, X, X),
            (None,) * 6,
        ],
    ),
    "heads_divide": ([(2, 2), (2, 4)], [(3, 4), (4, 2), (0, 2), (2, 0)]),
    "head_dim_supported": ([(16,), (48,), (256,)], [(8,), (0,), (24,), (272,), (64.0,), ("64",)]),
    "gate_parameters_fit": (
        [(torch.zeros(2), torch.zeros(32), 2, 16), (torch.zeros(2), None, 2, 16)],
        [(torch.zeros(4), torch.zeros(32), 2, 16), (torch.zeros(2), torch.zeros(2), 2, 16), (None, None, 2, 16), (X, None, 2, 16)],
    ),
    "gate_is_whole": ([(X, X, -5.0), (X, None, None), (None, None, None)], [(None, X, None), (None, None, -5.0)]),
    "lower_bound_is_negative": ([(None,), (-5.0,), (-1,)], [(0.0,), (5.0,), (float("-inf"),), (float("nan"),), ("-5",)]),
    "batch_is_packed": (
        [(torch.zeros(1, 7, 2, 16), torch.tensor([0, 7])), (torch.zeros(1, 0, 2, 16), torch.tensor([0]))],
        [
            (torch.zeros(2, 7, 2, 16), torch.tensor([0, 7])),
            (torch.zeros(1, 7, 2, 16), torch.tensor([], dtype=torch.int32)),
            (torch.zeros(1, 7, 2, 16), None),
        ],
    ),
    "one_index_per_sequence": ([(torch.tensor([3, -1]), 2)], [(torch.tensor([3]), 2), (torch.zeros(2, 1), 2), ([0, 1], 2)]),
    # H = 2, HV = 4, K = 16, V = 32: 64 columns of q and k, 128 of v
    "packed_width_fits": ([(192, 4, 16, 32), (256, 4, 16, 32)], [(191, 4, 16, 32), (128, 4, 16, 32), (224, 4, 16, 32), (96, 4, 16, 32)]),
    "tracking_is_paired": ([(X, X), (None, None)], [(X, None), (None, X)]),
    "snapshots_are_parallel": (
        [([0, 0], [64, 128], [5, 6]), (torch.tensor([0]), [64], torch.tensor([5])), ([], [], [])],
        [([0], [64, 128], [5, 6]), ([0], [64.0], [5]), ([0], [64], torch.tensor([True])), ([0], [64], None), (0, 64, 5)],
    ),
    "plan_fits": (
        [(kdaserve.plan_prefill(lengths=[51, 13]), 2, 64), (kdaserve.plan_prefill(lengths=[51, 13]), 2, 100)],
        [(kdaserve.plan_prefill(lengths=[51, 13]), 1, 64), (kdaserve.plan_prefill(lengths=[51, 13]), 2, 63), (None, 2, 64)],
    ),
    "elements_are_distinct": (
        [
            (X,),
            (X.T,),
            (X[:, ::2],),
            (X[:0],),
            (torch.zeros(()),),
            (X[:1].expand(1, 6),),
            (torch.zeros(12).as_strided((3, 2), (4, 1)),),
        ],
        [
            (X[:1].expand(4, 6),),
            (X[:, :1].expand(4, 6),),
            (torch.zeros(12).as_strided((3, 4), (2, 1)),),  # windows that overlap
            (torch.zeros(12).as_strided((2, 2), (1, 1)),),
            (None,),
        ],
    ),
    "can_update_in_place": ([(X,), (LEAF.clone(),)], [(LEAF,), (None,)]),
    "lengths_are_plannable": (
        [(torch.tensor([0, 51]), None), (None, [51, 0]), (None, [])],
        [(None, None), (torch.tensor([0]), [0]), (torch.tensor([0.0]), None), (torch.tensor([]).int(), None), (None, [-1]), (None, [1.5]), (None, 3)],
    ),
    "pool_sizes_fit": ([(4, 1, 2, 16, 32)], [(0, 1, 2, 16, 32), (4.0, 1, 2, 16, 32), (4, True, 2, 16, 32), (4, 1, 0, 16, 32), (4, 1, 2, 8, 32)]),
    "pool_has_room": ([(SimpleNamespace(free_slots=1),), (SimpleNamespace(free_slots=2), 2)], [(SimpleNamespace(free_slots=1), 2), (None,)]),
    "slot_is_held": ([(3, {1, 3})], [(2, {1, 3}), (-1, {1, 3}), (torch.tensor(3), {3}), (True, {1}), (None, {1})]),
    "configurations_fit": (
        [([],), ([{**dict.fromkeys(guards.CONFIGURATION), "config": {}}],)],
        [({},), ([None],), ([{"config": {}}],), ([dict.fromkeys(guards.CONFIGURATION)],), (None,)],
    ),
    "within_tolerance": ([(0.1, 0.1), (0.0, 0.1)], [(0.2, 0.1), (float("nan"), 0.1)]),
    "slots_in_range": (
        [([3, -1, 0], 4), (torch.tensor([3]), 4), ([], 4)],
        [([4], 4), (torch.tensor([0, 9]), 4), (torch.tensor([1.0]), 4), (None, 4)],
    ),
    "slots_unique": ([([3, -1, -1, 0],), ([3], torch.tensor([4])), ([],)], [([3, 3],), ([3, 1], [4, 3]), (None,), ([1.0],)]),
    "cu_seqlens_ordered": (
        [([0, 0, 70], 70), (torch.tensor([0, 51]), 64), ([0], 0)],
        [([1, 70], 70), ([0, 51, 13], 64), ([0, 71], 70), ([], 70), (None, 70), (torch.tensor([0.0]), 1)],
    ),
    "all_finite": ([(X, X)], [(X, poisoned(float("nan"))), (poisoned(float("-inf")),), (META,), (None,)]),
    "log_decay_nonpositive": ([(-X,), (poisoned(-1.0),)], [(poisoned(1e-6),), (poisoned(float("nan")),), (META,)]),
    "beta_in_unit_interval": ([(X,), (poisoned(1.0),)], [(poisoned(1.001),), (poisoned(-0.001),), (poisoned(float("nan")),), (META,)]),
    "chunk_idx_in_range": (
        [([1, -1, 0], [128, 0, 1]), (torch.tensor([2]), torch.tensor([130]))],
        [([2], [128]), ([0], [0]), ([0], [1, 1]), (None, [1]), ([0.5], [1])],
    ),
    "snapshots_fit": (
        [
            ([0, 0, 2], [64, 130, 64], [5, 6, 7], [130, 0, 64], 8),
            ([1, 9], [0, 1000], [0, -1], [130, 0, 64], 8),
            (torch.tensor([0]), torch.tensor([128]), torch.tensor([0]), torch.tensor([130]), 1),
            ([], [], [], [130], 8),
        ],
        [
            ([0], [100], [5], [130], 8),
            ([0], [192], [5], [130], 8),
            ([0], [-64], [5], [130], 8),
            ([1], [64], [5], [130], 8),
            ([-1], [64], [5], [130], 8),
            ([0], [64], [8], [130], 8),
            ([0], [64, 128], [5], [130], 8),
            ([0], [64], [5], None, 8),
        ],
    ),
}
ELSEWHERE = {"pool_is_dense", "out_does_not_overlap", "saved_call_is_there", "is_callers_mistake"}
"""Guards with tests of their own below."""


def test_every_guard_is_tested() -> None:
    assert set(CASES) | ELSEWHERE == set(GUARDS)
    assert all(f.__doc__ for f in GUARDS.values())


@pytest.mark.parametrize(("name", "arguments"), [(name, a) for name, (good, _) in CASES.items() for a in good])
def test_guard_is_true(name: str, arguments: tuple) -> None:
    assert GUARDS[name](*arguments) is True


@pytest.mark.parametrize(("name", "arguments"), [(name, a) for name, (_, bad) in CASES.items() for a in bad])
def test_guard_is_false(name: str, arguments: tuple) -> None:
    assert GUARDS[name](*arguments) is False


def test_distinct_elements_agree_with_the_addresses() -> None:
    """Never True where two elements have one address; True for every layout whose rows lie one after another."""
    memory = torch.zeros(64)
    for rows, columns, row_stride, column_stride in itertools.product((1, 2, 3), (1, 2, 4), (0, 1, 2, 3, 4, 8), (0, 1, 2, 3)):
        view = memory.as_strided((rows, columns), (row_stride, column_stride))
        places = [row * row_stride + column * column_stride for row in range(rows) for column in range(columns)]
        distinct = len(set(places)) == len(places)
        apart = row_stride > (columns - 1) * column_stride or column_stride > (rows - 1) * row_stride
        said = guards.elements_are_distinct(view)
        what = f"{tuple(view.shape)} with strides {view.stride()}"
        assert distinct or not said, f"{what} shares addresses"
        assert said or not (distinct and apart), f"{what} shares none"


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_no_elements_are_distinct(shape: tuple[int, int]) -> None:
    assert guards.elements_are_distinct(torch.zeros(1, 1)[: shape[0], : shape[1]].expand(shape))


def test_leaf_may_be_updated_without_gradients() -> None:
    with torch.no_grad():
        assert guards.can_update_in_place(LEAF)


def test_inference_tensors_may_be_updated_in_inference_mode_only() -> None:
    with torch.inference_mode():
        pool = torch.zeros(2)
        assert guards.can_update_in_place(pool)
    assert not guards.can_update_in_place(pool)
    assert guards.can_update_in_place(pool.clone())
    with torch.no_grad():
        assert not guards.can_update_in_place(pool)
        with pytest.raises(RuntimeError, match="inference tensor"):
            pool.add_(1)


@pytest.mark.parametrize(
    "pool",
    [
        torch.zeros(4, 2, 16, 32),
        torch.zeros(4, 3, 2, 16, 32)[:, 1],  # one layer of a slot-major pool
        torch.zeros(8, 2, 16, 32)[::2],
        torch.zeros(2, 16, 32).expand(1, 2, 16, 32),  # one slot cannot overlap another
        torch.zeros(4, 16, 2, 32).transpose(1, 2)[:, :1, :1],  # sizes of 1 may have any stride
        torch.zeros(0, 2, 16, 32),
    ],
)
def test_pool_is_dense(pool: torch.Tensor) -> None:
    assert guards.pool_is_dense(pool)


@pytest.mark.parametrize(
    "pool",
    [
        torch.zeros(2, 16, 32).expand(4, 2, 16, 32),
        torch.zeros(4, 2, 32, 16).transpose(-1, -2),
        torch.zeros(2, 4, 16, 32).transpose(0, 1),
        torch.zeros(4, 2, 16, 64)[..., ::2],
        torch.zeros(4, 2, 16, 64)[..., :32],
        torch.zeros(10_000).as_strided((4, 2, 16, 32), (512, 512, 32, 1)),
        torch.zeros(4, 16, 32),
        None,
    ],
)
def test_pool_is_not_dense(pool: Any) -> None:
    assert not guards.pool_is_dense(pool)


PACKED = torch.zeros(51, 2 * 32 + 32)
Q, K, V = (x.view(1, 51, 2, 16) for x in PACKED.split(32, dim=1))
FLAT = torch.zeros(10_000)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.zeros(3), torch.zeros(3)),
        (Q, K),  # columns of one buffer interleave
        (V, Q),
        (FLAT[:50], FLAT[50:]),
        (torch.empty_like(Q, device="meta"), torch.empty_like(Q, device="meta")),
        (FLAT[:0], FLAT),
        (FLAT, None),
    ],
)
def test_no_overlap(a: torch.Tensor, b: Any) -> None:
    assert guards.out_does_not_overlap(a, b)
    assert guards.out_does_not_overlap(a, FLAT.clone(), b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (Q, Q),
        (Q, PACKED),
        (V[:, :-1], V[:, 1:]),
        (FLAT[:51], FLAT[50:]),
        (FLAT.view(100, 100)[:, :60], FLAT.view(100, 100)[:, 40:]),
        (FLAT.view(100, 100)[:, 90:], FLAT[95:].as_strided((50, 10), (100, 1))),  # columns that run into the next row
    ],
)
def test_overlap(a: torch.Tensor, b: torch.Tensor) -> None:
    assert not guards.out_does_not_overlap(a, b)
    assert not guards.out_does_not_overlap(b, a)
    assert not guards.out_does_not_overlap(a, FLAT.clone(), b)


def test_overlap_agrees_with_the_bytes() -> None:
    """Against the set of bytes, for views that slice rows and columns of one buffer."""
    buffer = torch.zeros(6 * 8, dtype=torch.int16).view(6, 8)
    place = torch.arange(buffer.numel()).view(6, 8)
    cuts = [(r0, r1, c0, c1) for r0 in (0, 2) for r1 in (2, 3, 6) for c0 in (0, 3, 5) for c1 in (3, 6, 8) if r0 < r1 and c0 < c1]
    for a in cuts:
        for b in cuts:
            shared = set(place[a[0] : a[1], a[2] : a[3]].flatten().tolist()) & set(place[b[0] : b[1], b[2] : b[3]].flatten().tolist())
            views = (buffer[x[0] : x[1], x[2] : x[3]] for x in (a, b))
            assert guards.out_does_not_overlap(*views) is not bool(shared), (a, b)


def test_out_may_be_v_itself_and_nothing_like_it() -> None:
    assert guards.out_does_not_overlap(V, V, may_be_same=True)
    assert guards.out_does_not_overlap(V, V.view(51, 32).view(1, 51, 2, 16), may_be_same=True)
    assert not guards.out_does_not_overlap(V, V)
    assert not guards.out_does_not_overlap(V[:, 1:], V[:, :-1], may_be_same=True)
    assert not guards.out_does_not_overlap(V, V.view(1, 51, 1, 32), may_be_same=True)
    assert not guards.out_does_not_overlap(None, V)


def test_saved_call_is_two_files(tmp_path: Path) -> None:
    path = tmp_path / "call.safetensors"
    path.touch()
    assert not guards.saved_call_is_there(path)
    path.with_suffix(".json").touch()
    assert guards.saved_call_is_there(path)
    assert guards.saved_call_is_there(str(tmp_path / "call"))
    for other in (tmp_path, "", None, 3):
        assert not guards.saved_call_is_there(other)


def test_callers_mistakes_are_told_from_ours() -> None:
    with pytest.raises(kdaserve.KdaError) as raised:
        kdaserve.explain("KDA999")
    assert guards.is_callers_mistake(raised.value)
    ours = kdaserve.errors.error("KDA501", op="chunk_kda", backend="torch", cause="ZeroDivisionError: injected")
    assert not guards.is_callers_mistake(ours)
    assert not guards.is_callers_mistake(ValueError("no code"))


@pytest.mark.parametrize("name", sorted(GUARDS))
@pytest.mark.parametrize("value", [None, "text", 3, 1.5, [1, "x"], X, X[0], META, torch.tensor(1), {}, object()], ids=lambda v: type(v).__name__)
def test_guards_never_raise(name: str, value: Any) -> None:
    parameters = [p for p in inspect.signature(GUARDS[name]).parameters.values() if p.default is p.empty]
    given = {"Any": value, "Integers": value, "Collection[str]": ("a", "b"), "Collection[int]": {1}}
    assert GUARDS[name](*(given.get(p.annotation, 1) for p in parameters)) in (True, False)


def not_dense(kind: str) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch speaks of prototypes
        return X.to_sparse() if kind == "sparse" else torch.nested.nested_tensor([X, X[:2]])


@pytest.mark.parametrize("name", sorted(GUARDS))
@pytest.mark.parametrize("kind", ["sparse", "nested"])
def test_guards_never_raise_for_tensors_without_strides(name: str, kind: str) -> None:
    test_guards_never_raise(name, not_dense(kind))


def test_good_calls_pass_all_their_guards() -> None:
    call = prefill_inputs(lengths=[130, 0, 64], heads=2, v_heads=4, v_dim=32)
    q, v, pool, indices, bounds = (call[name] for name in ("q", "v", "initial_state", "initial_state_indices", "cu_seqlens"))
    assert guards.gates_cover_q(q, call["g"], call["beta"])
    assert guards.pool_is_indexed(pool, indices)
    assert guards.pool_is_dense(pool)
    assert guards.heads_divide(q.shape[2], v.shape[2])
    assert guards.gate_parameters_fit(call["A_log"], call["dt_bias"], *call["g"].shape[2:])
    assert guards.slots_in_range(indices, len(pool))
    assert guards.slots_unique(indices)
    assert guards.cu_seqlens_ordered(bounds, q.shape[1])
    assert guards.one_index_per_sequence(indices, len(bounds) - 1)
    assert guards.all_finite(q, call["k"], v, call["g"], call["beta"], pool)
    decode = decode_inputs(batch=3, heads=2, v_heads=4, v_dim=32)
    _, HV, V_dim, K_dim = decode["initial_state"].shape
    assert guards.packed_width_fits(decode["mixed_qkv"].shape[1], HV, K_dim, V_dim)

"""What the tests that only a GPU can run share: captured calls, comparisons that stay on the device, room for large tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import gc
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conftest import Call, Target
from helpers import DECODE, NAN
from kdaserve import Snapshots
from kdaserve.testing import assert_same_bits, decode_inputs, prefill_inputs

DATA = ("q", "k", "v", "g", "beta")
WRITTEN = ("initial_state", "out", "track_state")
STRONG, WEAK = {"bounded": 12.0, "softplus": 50.0, "none": -50.0}, {"bounded": -12.0, "softplus": -12.0, "none": -1e-4}
"""Gate inputs of tokens that forget and of tokens that keep, by gate."""


def call_with_states(op: str, lengths: list[int], device: str, seed: int = 0, **options: Any) -> Call:
    """A call that hands out states on the way, its lists on the device; of decode, one request a sequence."""
    if op == DECODE:
        return decode_inputs(len(lengths), device=device, seed=seed, **options)
    saved = [(n, t) for n, length in enumerate(lengths) for t in {64 * (length // 64), length}]
    call = prefill_inputs(lengths, slots=len(lengths) + len(saved), device=device, seed=seed, **options)
    taken = set(call["initial_state_indices"].tolist())
    free = [slot for slot in range(len(call["initial_state"])) if slot not in taken]
    return call | {"snapshots": snapshots([(*entry, slot) for entry, slot in zip(saved, free, strict=True)], device)}


def snapshots(entries: list[tuple[int, int, int]], device: str) -> Snapshots:
    """Entries (sequence, tokens, slot) on the device, where a graph can read them."""
    return Snapshots(*torch.tensor(entries, device=device).view(-1, 3).unbind(1))


def decay_in_places(g: Tensor, gate: str) -> Tensor:
    """Half of the channels forget all they hold at each of the first 70 tokens, beside others that keep it; later tokens as they were."""
    g = g.clone()
    g[:, :70, :, ::2] = STRONG[gate]
    g[:, :70, :, 1::2] = WEAK[gate]
    return g


def results(target: Target, op: str, call: Call) -> dict[str, Tensor]:
    """All that a call gives, on copies of what it writes."""
    own = {**call, **{name: call[name].clone() for name in WRITTEN if call.get(name) is not None}}
    found = target.run(op, own)
    parts = (found[0],) if op == DECODE else found if isinstance(found, tuple) else (found,)
    return {**dict(zip(("output", "h"), parts, strict=False)), **{name: own[name] for name in WRITTEN if own.get(name) is not None}}


def assert_same_results(actual: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    assert actual.keys() == expected.keys()
    for name, x in actual.items():
        assert_same_bits(x, expected[name], f"{name} {what}")


def differ(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> Tensor:
    """Whether any bit differs, as a tensor on the device: waiting for it would put one call after the other."""
    integers = {2: torch.int16, 4: torch.int32}
    pairs = ((x.view(integers[x.element_size()]), expected[name].view(integers[x.element_size()])) for name, x in actual.items())
    return torch.stack([(x != y).any() for x, y in pairs]).any()


# Graphs


def tensors(call: Call) -> dict[str, Tensor]:
    """The tensors of a call by name, those of its snapshots too."""
    found = {name: x for name, x in call.items() if isinstance(x, Tensor)}
    saved = call.get("snapshots")
    return found if saved is None else found | {f"snapshots.{name}": getattr(saved, name) for name in ("sequence", "tokens", "slot")}


@dataclasses.dataclass(frozen=True, eq=False)
class Captured(Target):
    """One call in a CUDA graph. `run` changes the captured tensors in place, replays, and copies back what was written."""

    call: Call
    result: Any
    graph: Any

    def __str__(self) -> str:
        return f"{super().__str__()}, replayed"

    def run(self, op: str, call: Call, **changes: Any) -> Any:
        """The result of `call`, which may differ from the captured one in what its tensors hold and in nothing else."""
        call = {**call, **changes}
        given, fixed = tensors(call), tensors(self.call)
        assert {n: (x.shape, x.dtype) for n, x in given.items()} == {n: (x.shape, x.dtype) for n, x in fixed.items()}
        others = call.keys() - given.keys() - {"snapshots"}
        assert {name: call[name] for name in others} == {name: self.call[name] for name in others}
        for name, x in given.items():
            fixed[name].copy_(x)
        parts = self.result if isinstance(self.result, tuple) else (self.result,)
        if op != DECODE:  # its result is what came in, and was just set
            for x in parts:
                x.fill_(NAN)
        self.graph.replay()
        torch.cuda.synchronize()
        for name, x in given.items():
            if name in WRITTEN:
                x.copy_(fixed[name])
            else:
                assert_same_bits(fixed[name], x, f"{self}: {op}: input {name}")
        if op == DECODE:
            return call["out"], call["initial_state"]
        copies = tuple(x.clone() for x in parts)
        return copies if isinstance(self.result, tuple) else copies[0]


def captured(target: Target, op: str, call: Call) -> Captured:
    """`call` in a graph, after two runs outside of one: what the first leaves behind, the second has used."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            target.run(op, call)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = target.run(op, call)
    return Captured(target.backend, target.device, call, result, graph)


@contextlib.contextmanager
def no_syncs() -> Iterator[None]:
    """What would wait for the GPU raises instead."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Large tensors


def alone_with_the_memory(job: Callable[[], Any]) -> Any:
    """What `job` gives, of which only one at a time runs, of all processes of this machine. Its tensors are gone when it ends, also when it fails."""
    with (Path(tempfile.gettempdir()) / "kdaserve_gpu_memory.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return job()
        except BaseException as failure:
            traceback.clear_frames(failure.__traceback__)
            raise
        finally:
            gc.collect()
            torch.cuda.empty_cache()


def every_element(x: Tensor, is_right: Any, rows: int) -> bool:
    """Whether `is_right` holds all over `x`, of which it sees so many rows at a time."""
    return all(bool(is_right(x[i : i + rows]).all()) for i in range(0, len(x), rows))

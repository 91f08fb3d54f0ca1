"""What `kdaserve demo` shows: the demo model served with and without prefix reuse, timed and checked."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

import torch

from kdaserve.demo.model import START, ByteLM, load_model
from kdaserve.demo.serve import Engine, Prefix, Served
from kdaserve.testing.compare import relative_error

TOLERANCE = 3e-5
SPARE_SLOTS = 3
TIMED_RUNS = 3

Step = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Report:
    """One run of the demo.

    Attributes:
        prompts, texts: as text; undecodable bytes replaced.
        prefix_tokens: tokens of the saved prefix, 0 when the prompts share less than a chunk.
        first_token_seconds: until every prompt had its first byte, by "with reuse" and "without reuse"; the median of some runs.
        prefill_tokens_per_second: of the run without reuse. decode_tokens_per_second: of both runs; 0 when nothing was decoded.
        largest_deviation: relative, of any layer's state of any slot, from the fp64 reference.
        problems: what the checks found; empty when all is well.
    """

    prompts: list[str]
    texts: list[str]
    prefix_tokens: int
    first_token_seconds: dict[str, float]
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    largest_deviation: float
    problems: list[str]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch on one core. The model is so small that threads wait more than they work: on two busy cores two threads take 10 to 50 times longer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def measure(prompts: Sequence[str], limit: int, step: Step = lambda _: None) -> Report:
    """Serves `prompts` in every way and compares; calls `step` with what comes next."""
    step("loading the model")
    model, texts = load_model(), [START + prompt.encode(errors="replace") for prompt in prompts]
    slots = len(texts) + 1 + SPARE_SLOTS
    Engine(model, slots).generate([START * 2], 2)  # whatever PyTorch sets up on first use is not ours to time

    step("serving with a saved prefix")
    reusing, plain = Engine(model, slots), Engine(model, slots)
    prefix = reusing.save_prefix(texts)
    reused = reusing.generate(texts, limit, prefix)
    step("serving without reuse")
    whole = plain.generate(texts, limit)

    step("comparing with the fp64 reference")
    problems = touched(reusing, reused, prefix) + differences(reusing, reused, plain, whole)
    deviation = largest_deviation(reusing, texts, reused, prefix)
    if not deviation <= TOLERANCE:
        problems.insert(0, f"a state deviates by {deviation:.1e} from the fp64 reference, allowed are {TOLERANCE:.0e}")

    step("timing the first token")
    first = {"with reuse": time_to_first_token(model, texts, reuse=True), "without reuse": time_to_first_token(model, texts, reuse=False)}
    decode_seconds = reused.decode_seconds + whole.decode_seconds
    return Report(
        prompts=[text[len(START) :].decode(errors="replace") for text in texts],
        texts=[text.decode(errors="replace") for text in reused.texts],
        prefix_tokens=len(prefix.text) if prefix else 0,
        first_token_seconds=first,
        prefill_tokens_per_second=whole.prefill_tokens / first["without reuse"],
        decode_tokens_per_second=(reused.decode_tokens + whole.decode_tokens) / decode_seconds if decode_seconds else 0.0,
        largest_deviation=deviation,
        problems=problems,
    )


def differences(a: Engine, served_a: Served, b: Engine, served_b: Served) -> list[str]:
    """Where two runs of the same prompts differ in text or in any bit of a state."""
    found = []
    for i, (text_a, text_b) in enumerate(zip_longest(served_a.texts, served_b.texts)):
        if text_a != text_b:
            found.append(f"prompt {i}: the text with prefix reuse differs from the one without")
    for i, (slot_a, slot_b) in enumerate(zip(served_a.slots, served_b.slots, strict=True)):
        for layer in range(len(a.model.blocks)):
            for kind in ("recurrent", "conv"):
                state_a, state_b = (getattr(engine.pool, kind)(layer)[slot] for engine, slot in ((a, slot_a), (b, slot_b)))
                if not torch.equal(state_a.view(torch.int32), state_b.view(torch.int32)):
                    found.append(f"prompt {i}, layer {layer}: the {kind} state with prefix reuse has other bits than the one without")
    return found


def touched(engine: Engine, served: Served, prefix: Prefix | None) -> list[str]:
    """Slots that belong to no one and yet hold something."""
    used = {*served.slots, *([prefix.slot] if prefix else [])}
    found = []
    for slot in set(range(engine.pool.slots)) - used:
        for layer in range(len(engine.model.blocks)):
            if engine.pool.recurrent(layer)[slot].any() or engine.pool.conv(layer)[slot].any():
                found.append(f"slot {slot}, layer {layer}: written, but given to no request")
    return found


def largest_deviation(engine: Engine, texts: Sequence[bytes], served: Served, prefix: Prefix | None) -> float:
    """Of all states, prefix and decoded tokens included, from those of one prefill of everything they have seen on the backend `reference`."""
    seen = [text + new[:-1] for text, new in zip(texts, served.texts, strict=True)]
    slots = [*served.slots]
    if prefix:
        seen.append(prefix.text)
        slots.append(prefix.slot)
    judge = Engine(engine.model, engine.pool.slots, backend="reference")
    judge.prefill(seen, slots)
    errors = [
        relative_error(kind(engine)(layer)[slot], kind(judge)(layer)[slot])
        for kind in (lambda e: e.pool.recurrent, lambda e: e.pool.conv)
        for layer in range(len(engine.model.blocks))
        for slot in slots
    ]
    return torch.tensor(errors).max().item()  # unlike max(), keeps a NaN


def time_to_first_token(model: ByteLM, texts: Sequence[bytes], reuse: bool) -> float:
    """Seconds from the arrival of all prompts to the first byte of each; the median of some runs."""
    engine = Engine(model, len(texts) + 1)
    prefix = engine.save_prefix(texts) if reuse else None
    seconds = []
    for _ in range(TIMED_RUNS):
        served = engine.generate(texts, 1, prefix)
        engine.release(served)
        seconds.append(served.prefill_seconds)
    return statistics.median(seconds)

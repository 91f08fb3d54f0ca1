"""Helion's autotuner on the kernels that a call launches."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Sequence
from typing import Any

import helion
import triton.testing
from torch import Tensor

from kdaserve.dispatch import installed_version
from kdaserve.ops.helion import launch as launches
from kdaserve.ops.helion.launch import Launch

PACKAGES = ("helion", "torch", "triton")
GAIN = 0.98
"""A configuration is kept when it takes at most this part of the time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """A launch, and what it was called with."""

    launch: Launch
    tensors: Sequence[Tensor | None]
    numbers: Sequence[float]

    def arguments(self) -> tuple[Any, ...]:
        """Those of the kernel as Helion takes them, constants included."""
        later = dict(zip(self.launch.later, self.numbers, strict=True))
        given = dict(zip(self.launch.views, map(_like, self.tensors, self.launch.views.values()), strict=True))
        found = {**self.launch.arguments, **given, **later}
        return *found.values(), *self.launch.generated.variant.constants.values()


def tune(run: Callable[[], Any], effort: str, seconds: int | None, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """Tunes every kernel that `run`, a call on the backend, launches.

    Args:
        effort: ``"quick"`` or ``"full"``, as Helion means them; seconds: at most, a kernel.
        progress: told what is tuned, and what came out.

    Returns:
        Entries for `tuned.keep`, one for each kernel that a new configuration makes faster.
    """
    entries = []
    for seen in observed(run):
        generated = seen.launch.generated
        progress(f"{generated.kernel.name}: {generated.config}")
        found = search(seen, effort, seconds)
        before, after = milliseconds(seen, generated.config), milliseconds(seen, found)
        kept = after <= GAIN * before
        progress(f"{generated.kernel.name}: {before:.4f} ms, tuned {after:.4f} ms, {'kept' if kept else 'not kept'}: {found}")
        if kept:
            entries.append({**generated.identity, "config": found, "evidence": evidence(seen, before, after)})
    return entries


def observed(run: Callable[[], Any]) -> list[Seen]:
    """The launches of a call, each kernel once."""
    found: list[Seen] = []

    def observer(launch: Launch, tensors: Sequence[Tensor | None], numbers: Sequence[float]) -> None:
        if launch.asked.programs and all(seen.launch.generated is not launch.generated for seen in found):
            found.append(Seen(launch, tensors, numbers))

    launches.OBSERVERS.append(observer)
    try:
        run()
    finally:
        launches.OBSERVERS.remove(observer)
    return found


def search(seen: Seen, effort: str, seconds: int | None) -> dict[str, Any]:
    """The best configuration that Helion finds."""
    generated = seen.launch.generated
    tunable = generated.kernel.helion(
        generated.variant.precision,
        autotune_effort=effort,
        autotune_budget_seconds=seconds,
        autotune_config_overrides={"indexing": "pointer", **generated.kernel.fixed},  # descriptors take aligned tensors alone
        autotune_seed_configs=helion.Config(**generated.config),
    )
    arguments = seen.arguments()
    return dict(tunable.bind(arguments).autotune(arguments, force=True).config)


def milliseconds(seen: Seen, config: dict[str, Any]) -> float:
    """Median time of a launch in a configuration."""
    arguments = seen.arguments()
    run = seen.launch.generated.kernel.helion(seen.launch.generated.variant.precision).bind(arguments).compile_config(helion.Config(**config))
    return triton.testing.do_bench_cudagraph(lambda: run(*arguments), return_mode="median")


def evidence(seen: Seen, before: float, after: float) -> dict[str, Any]:
    """What is kept beside a configuration."""
    shapes = {name: list(x.shape) for name, x in zip(seen.launch.views, seen.tensors, strict=True) if x is not None}
    versions = {package: installed_version(package) for package in PACKAGES}
    return {"milliseconds": after, "milliseconds_before": before, "shapes": shapes, "versions": versions, "date": f"{datetime.date.today()}"}


def _like(x: Tensor | None, view: Tensor | None) -> Tensor | None:
    """`x` in the shape and strides of `view`."""
    return None if x is None or view is None else x.as_strided(view.shape, view.stride())

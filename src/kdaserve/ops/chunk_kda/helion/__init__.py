"""Prefill in two Helion kernels: `prepare`, for all chunks and heads at once, and `chain`, chunk after chunk.

Between them lies a workspace of one record a chunk and head, found on the device from `cu_seqlens` without a prefix sum or a sync. A *unit* is a
chunk of 64 tokens of one sequence; sequence n owns the units from cu_seqlens[n] // 64 + n on, which leaves room for all its chunks, whatever the
lengths before it are, so that T // 64 + N units suffice. Four tensors, flat, hold the records: `rows` has k decayed from the chunk's start, q
likewise, and k decayed to the chunk's end, `[3, C, BK]` a record; `pairs` the q.k of E10 and M beta, `[2, C, C]`; `decay` that of the chunk, `[BK]`;
`mark` whether it is too wide.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kdaserve.contract import CHUNK
from kdaserve.ops.chunk_kda.helion import config
from kdaserve.ops.chunk_kda.helion.chain import chain_kernel
from kdaserve.ops.chunk_kda.helion.prepare import prepare_kernel
from kdaserve.ops.forms import Form
from kdaserve.ops.helion.launch import Launch, Variant, flat
from kdaserve.ops.helion.states import ENTRIES
from kdaserve.ops.jit import chunking, prefill
from kdaserve.ops.jit.launch import dense, gate_name, padded, strides
from kdaserve.ops.prefill import PrefillCall


def run(call: PrefillCall) -> tuple[Tensor, Tensor | None]:
    """Runs a prefill call; see `chunk_kda`."""
    return prefill.run(call, Launches, fits=lambda o: o.stride(-1) == 1)


def forms(call: PrefillCall) -> list[Form]:
    """See `kdaserve.ops.forms`."""
    return chunking.chain_forms(call, config.operands(call.q.dtype, call.use_qk_l2norm_in_kernel).dtype)


def compiled() -> int:
    """See `kdaserve.ops.forms`."""
    return len(prepare_kernel.compiled) + len(chain_kernel.compiled)


class Launches:
    """What runs calls of one layout."""

    def __init__(self, call: PrefillCall, o: Tensor, h: Tensor | None, snapshots: prefill.Snapshots) -> None:
        T, N, H, HV, K, V = (call.sizes[s] for s in ("T", "N", "H", "HV", "K", "V"))
        form, units = config.operands(call.q.dtype, call.use_qk_l2norm_in_kernel), chunking.units(call)
        chosen = chunking.chain_of(call, N, form.dtype)
        self._op, self._BK = form.dtype, padded(K)
        self._records = units * HV
        prepare, chain = self._tensors(call, o, h, snapshots, self._space(o, 2))
        numbers = {"N": N, "T": T, "HV": HV, "units": units, "scale": call.scale, "lower_bound": call.lower_bound or 0.0}
        dims = {"K": K, "V": V, "BK": self._BK}

        def prepared(wide: str, kernel: config.Prepare) -> Launch:
            constants = {
                "C": CHUNK, "GROUP": HV // H, **dims, "BV": padded(V), "BS": min(kernel.slice, self._BK),
                "GATE": gate_name(call), "L2NORM": call.use_qk_l2norm_in_kernel, "BETA_RAW": call.beta_is_raw,
                "WIDE": wide, "PARTS": form.parts, "OP": form.dtype, "MERGE": form.merge,
            }  # fmt: skip
            variant = Variant(constants, {"num_warps": kernel.warps, "num_stages": kernel.stages}, form.prepare)
            return Launch(prepare_kernel, prepare, numbers, ("scale", "lower_bound"), variant)

        kernels = {"never": config.PREPARE} if chunking.bounded(call) else {"marked": config.PREPARE, "only": config.PREPARE_WIDE}
        self._prepares = [prepared(wide, kernel) for wide, kernel in kernels.items()]
        constants = {"C": CHUNK, **dims, "BV": chosen.slice, "TRANSPOSED": chosen.transposed, "ENTRIES": ENTRIES, "OP": form.dtype}
        pool_stride, track_stride = *strides(call.initial_state, 1), *strides(call.track_state, 1)
        self._chain = Launch(
            chain_kernel,
            {**chain, "pool": flat(call.initial_state), "track": flat(call.track_state), "h": flat(h)},
            {"N": N, "T": T, "HV": HV, "pool_stride": pool_stride, "track_stride": track_stride, "M": 0},
            ("M",),
            Variant(constants, {"num_warps": chunking.CHAIN_WARPS, "num_stages": chosen.stages}, form.chain),
        )

    def __call__(self, call: PrefillCall, o: Tensor, h: Tensor | None, snapshots: prefill.Snapshots) -> None:
        """Launches the kernels."""
        prepare, chain = self._tensors(call, o, h, snapshots, self._space(o, self._records))
        if self._records:
            values = tuple(prepare.values())
            for launch in self._prepares:
                launch(values, call.scale, call.lower_bound or 0.0)
        self._chain(tuple(chain.values()), 0 if snapshots is None else len(snapshots[0]))

    def _space(self, o: Tensor, records: int) -> dict[str, Tensor]:
        """The workspace."""
        return {
            "rows": torch.empty(records * 3 * CHUNK * self._BK, dtype=self._op, device=o.device),
            "pairs": torch.empty(records * 2 * CHUNK * CHUNK, dtype=self._op, device=o.device),
            "decay": torch.empty(records * self._BK, dtype=torch.float32, device=o.device),
            "mark": torch.empty(records, dtype=torch.float32, device=o.device),
        }

    @staticmethod
    def _tensors(call: PrefillCall, o: Tensor, h: Tensor | None, snapshots: tuple[Tensor, ...] | None, space: dict[str, Tensor]) -> tuple[dict, dict]:
        """The tensors of the two kernels by parameter."""
        cu_seqlens = dense(call.cu_seqlens)
        gate = {"A_log": dense(call.A_log), "dt_bias": dense(call.dt_bias)}
        prepare = {"q": call.q, "k": call.k, "g": call.g, "beta": call.beta, **gate, "cu_seqlens": cu_seqlens, "o": o, **space}
        chain = {
            "rows": space["rows"],
            "pairs": space["pairs"],
            "decay": space["decay"],
            "v": call.v,
            "o": o,
            "pool": call.initial_state,
            "index": dense(call.initial_state_indices),
            "cu_seqlens": cu_seqlens,
            "h": h,
            "chunk_offsets": None if h is None else call.host_plan().chunk_offsets,
            "track": call.track_state,
            "track_chunk": dense(call.track_chunk_idx),
            **dict(zip(("sequence", "tokens", "slots"), snapshots or (None, None, None), strict=True)),
        }
        return prepare, chain

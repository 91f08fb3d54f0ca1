"""Errors of tensors: one is missing, or its type, shape, dtype, device or strides are wrong (KDA101 to KDA113)."""

from kdaserve.errors.entry import Entry

ENTRIES: tuple[Entry, ...] = (
    Entry(
        code="KDA101",
        title="Prefill without an indexed state pool",
        raises="ContractError",
        message="{op}: KDA prefill requires an indexed initial-state pool: {missing}.",
        fix="pass `initial_state` [slots, HV, V, K] (zeros for new requests) and `initial_state_indices` [N], one slot a sequence.",
        meaning="""Prefill reads the state of each sequence from a pool and writes the new state back into the same slot. It
needs the pool and the slot of every sequence. At least one of the two is None, so the final state would have nowhere to go and
decode would start from nothing.""",
        trigger="`chunk_kda` or `recurrent_kda` is called with `initial_state` or `initial_state_indices` None or left out.",
        situations=(
            "The first-prefill path of an engine passes None because the request has no state yet.",
            "The pool is passed and the indices are not, or the reverse: only one of the two was wired into the layer's metadata.",
            "Code was ported from a stateless reference that returns its final state instead of updating a pool.",
            "A unit test or a profiling run was cut short and calls the kernel with q, k, v, g and beta alone.",
        ),
        solutions=(
            "Allocate the pool once: `torch.zeros(num_slots, HV, V, K)`, or `kdaserve.StatePool`, and pass one slot id a sequence.",
            "For a request without prior state take a slot that holds zeros and pass it as usual; None does not mean zero.",
            "In an engine, hand the layer's pool and the slot ids of the cache manager to the call, in the order of `cu_seqlens`.",
            "Where no state is kept at all, give every sequence the index -1: it starts from zeros and stores nothing.",
        ),
        before="""\
call = prefill_inputs(lengths=[51])
call["initial_state"] = call["initial_state_indices"] = None
kdaserve.chunk_kda(**call)""",
        after="""\
call = prefill_inputs(lengths=[51])
call["initial_state"] = torch.zeros(4, 2, 16, 16)  # [slots, HV, V, K]
call["initial_state_indices"] = torch.tensor([3])
kdaserve.chunk_kda(**call)""",
        validation='assert kdaserve.guards.pool_is_indexed(call["initial_state"], call["initial_state_indices"])',
        guard="pool_is_indexed",
        prevention=(
            "Make pool and indices required fields of the layer's metadata, so that no path can build it without them.",
            "Run the first-prefill path in a test, not only the path that continues a request.",
        ),
        related=("KDA108", "KDA116", "KDA123", "KDA301"),
    ),
    Entry(
        code="KDA102",
        title="g or beta is shorter than q",
        raises="ContractError",
        message="{op}: g and beta must cover every q token: `{argument}` has {got} rows, q has {expected}.",
        fix="recompute or re-slice `{argument}` so that `{argument}.shape[1] >= {expected}`; longer ones are trimmed.",
        meaning="""Every token needs its own decay (`g`) and its own write strength (`beta`). `q` has more rows than one of
them, so the last tokens have no gate. Reading on would take gates of another request or memory that is not ours. The reverse
is fine: rows of `g` and `beta` past the end of `q` are ignored, because engines pad gates to the size of a CUDA graph.""",
        trigger="`g.shape[1] < q.shape[1]` or `beta.shape[1] < q.shape[1]`.",
        situations=(
            "The gates were computed or sliced for an earlier, shorter chunk of the prompt.",
            "In chunked prefill the gate projection runs one chunk behind the q, k, v projection.",
            "A scheduler merged requests into one batch and recomputed the gates for some of them only.",
            "A slice is off by one, such as `g[:, :end - 1]` beside `q[:, :end]`.",
            "q and g were packed by two code paths with different totals, one with padding tokens and one without.",
        ),
        solutions=(
            "Recompute the gates from the hidden states that q comes from, after the batch is final.",
            "Use the same `cu_seqlens` and the same token range for all projections of a step.",
            "Re-slice so that `g.shape[1] >= q.shape[1]` and `beta.shape[1] >= q.shape[1]`; do not fill up with zeros, a zero is a real gate.",
            "If q is padded to a graph size, pad g and beta to that size too, or cut q to the real tokens.",
        ),
        before="""\
call = prefill_inputs(lengths=[51])
call["g"] = call["g"][:, :40]  # gates of an earlier, shorter chunk
kdaserve.chunk_kda(**call)""",
        after="""\
call = prefill_inputs(lengths=[51])
assert call["g"].shape[1] == call["beta"].shape[1] == call["q"].shape[1]
kdaserve.chunk_kda(**call)""",
        validation='assert kdaserve.guards.gates_cover_q(call["q"], call["g"], call["beta"])',
        guard="gates_cover_q",
        prevention=(
            "Compute q, k, v, g and beta from one tensor of hidden states in one function, and slice them in one place.",
            "Test chunked prefill with chunks that grow, such as 40 tokens and then 51.",
        ),
        related=("KDA104", "KDA115", "KDA303"),
    ),
    Entry(
        code="KDA103",
        title="Wrong number of dimensions",
        raises="ContractError",
        message="{op}: {what} (got {got}), laid out as {shape}.",
        fix="reshape it to {shape} with view, unsqueeze or squeeze, or pass the tensor that has this layout.",
        meaning="""A tensor has too many or too few dimensions for its layout. Sizes that happen to multiply to the right total
are not enough: the kernel addresses every dimension by its own stride.""",
        trigger="`tensor.ndim` differs from the number of dimensions in the layout that the message shows.",
        situations=(
            "Packed tokens are passed as [T, H, K]; prefill wants the batch dimension, [1, T, H, K].",
            "Decode gets `mixed_qkv` as [B, 1, W] because the model keeps a token dimension of 1.",
            "Heads were not split yet: g is `[1, T, HV*K]` straight from the projection.",
            "The whole pool of all layers is passed, [layers, slots, HV, V, K], instead of the part of one layer.",
        ),
        solutions=(
            "Packed prefill: add the batch dimension with `x.unsqueeze(0)`.",
            "Decode: drop the token dimension with `x.squeeze(1)`, which copies nothing.",
            "Split heads with `x.view(*x.shape[:-1], HV, K)`.",
            "Pass the pool of one layer, such as `pool.recurrent(layer)`.",
        ),
        before="""\
call = decode_inputs(batch=2)
call["mixed_qkv"] = call["mixed_qkv"][:, None]  # [B, 1, W]
kdaserve.packed_decode_kda(**call)""",
        after="""\
call = decode_inputs(batch=2)
call["mixed_qkv"] = call["mixed_qkv"][:, None].squeeze(1)  # [B, W]
kdaserve.packed_decode_kda(**call)""",
        validation='assert kdaserve.guards.has_ndim(call["mixed_qkv"], 2)',
        guard="has_ndim",
        prevention=(
            "Write the layout beside every tensor in the model, and name dimensions as this library does.",
            "Keep one function in the layer that brings projections into the layout of the kernels.",
        ),
        related=("KDA104", "KDA109", "KDA117"),
    ),
    Entry(
        code="KDA104",
        title="Sizes of two arguments disagree",
        raises="ContractError",
        message="{op}: `{argument}` {shape} must be {layout}: dimension {dim} ({symbol}) is {got}, but {source} says {expected}.",
        fix="compare the order of dimensions of `{argument}` and of what it is compared with to their layouts, then make the sizes agree.",
        meaning="""Each letter in the layouts (B, T, H, HV, K, V) stands for one size in the whole call. The first argument
that carries a letter sets it, and a later one disagrees. The check cannot know which of the two is wrong, so the message names
both.""",
        trigger="A dimension differs from the size that an earlier argument gave to the same letter, or from a fixed size.",
        situations=(
            "Tensor parallel: q, k, v are already split over ranks, while the pool or the gates still have all heads.",
            "The pool was allocated for a draft model or another layer with other head dimensions.",
            "The pool was allocated as [slots, HV, K, V] although K and V differ; this library keeps [slots, HV, V, K].",
            "The decode output was allocated for the largest batch of a CUDA graph and not cut to the batch of this call.",
            "Grouped heads: g or beta has H heads; both belong to value heads and have HV.",
        ),
        solutions=(
            "Divide head counts by the tensor parallel size in one place, and allocate the pool with the local HV.",
            "Allocate one pool for each kind of layer, from that layer's own HV, V and K.",
            "For a pool kept as [slots, HV, K, V] transpose it once when it is made; do not transpose in every step.",
            "Cut graph buffers to the batch: `out[:B]`.",
        ),
        before="""\
call = prefill_inputs(lengths=[51], heads=2)
call["initial_state"] = torch.zeros(8, 4, 16, 16)  # heads of both ranks
kdaserve.chunk_kda(**call)""",
        after="""\
call = prefill_inputs(lengths=[51], heads=2)
call["initial_state"] = torch.zeros(8, 4 // 2, 16, 16)  # heads of this rank
kdaserve.chunk_kda(**call)""",
        validation="""\
names = ("q", "k", "v", "g", "beta", "initial_state")
assert kdaserve.guards.prefill_shapes_agree(*(call[name] for name in names))""",
        guard="prefill_shapes_agree",
        prevention=(
            "Take all sizes from the model's configuration once and allocate pool, gates and outputs from the same numbers.",
            "Test with V different from K and HV different from H; equal sizes hide swapped dimensions.",
        ),
        related=("KDA102", "KDA103", "KDA110", "KDA112", "KDA116"),
    ),
    Entry(
        code="KDA105",
        title="dtype not accepted",
        raises="ContractError",
        message="{op}: `{argument}` is {got}; it must be one of: {expected}.",
        fix="make `{argument}` one of {expected}; allocate what is written (`initial_state`, `out`) in it, a converted copy would be lost.",
        meaning="""The dtype of a tensor is none of those its argument takes. Data is floating point, indices are int32 or
int64, and the gate parameters `A_log` and `dt_bias` stay in float32: rounding them to bfloat16 changes the decay of every
token, and the error grows in the state.""",
        trigger="`tensor.dtype` is not in the list of the argument.",
        situations=(
            "`model.to(torch.bfloat16)` or a checkpoint loader cast `A_log` and `dt_bias` along with the weights.",
            "Indices come from a comparison, an arange in float, or numpy, and are bool, float32 or int16.",
            "A quantised pipeline passes float8 or integer activations to the kernel.",
            "`track_state` was allocated in the pool's bfloat16; it is always float32.",
        ),
        solutions=(
            "Keep `A_log` and `dt_bias` in float32 when loading: load them as float32, or call `.float()` once after loading.",
            "Convert indices once when the step's metadata is built: `slots.to(torch.int32)`.",
            "Dequantise activations before the kernel.",
        ),
        before="""\
call = prefill_inputs(lengths=[51])
call["A_log"] = call["A_log"].bfloat16()  # model.to(torch.bfloat16)
kdaserve.chunk_kda(**call)""",
        after="""\
call = prefill_inputs(lengths=[51])
assert call["A_log"].dtype == torch.float32  # loaded as float32 and kept so
kdaserve.chunk_kda(**call)""",
        validation='assert kdaserve.guards.has_dtype(call["A_log"], torch.float32)',
        guard="has_dtype",
        prevention=(
            "Mark the gate parameters of the model as float32 and let the loader refuse another dtype.",
            "Give every index buffer an explicit dtype when it is allocated.",
        ),
        related=("KDA106", "KDA108"),
    ),
    Entry(
        code="KDA106",
        title="dtype differs from that of its sibling",
        raises="ContractError",
        message="{op}: `{argument}` is {got}, but `{source}` is {expected}; the two must have one dtype.",
        fix="give both one dtype; allocate `out` in it, a converted copy would be lost.",
        meaning="""q, k and v enter the same matrix products, and the output is written in their dtype. Mixed dtypes would need
a hidden conversion of a whole tensor in every call, so the call is refused. g, beta and the pool are free to have a dtype of
their own.""",
        trigger="`k`, `v` or `out` has another dtype than `q`, or the decode `out` another than `mixed_qkv`.",
        situations=(
            "A norm or a rotary function returns float32 for q and k, while v stays bfloat16.",
            "Autocast covers the projection of v and not the code that makes q and k.",
            "The output buffer of a CUDA graph was allocated with the default dtype, float32.",
        ),
        solutions=(
            "Convert after the norm: `k = k.to(v.dtype)`. Inside the kernel all arithmetic is float32 anyway.",
            "Leave the norm to the kernel with `use_qk_l2norm_in_kernel=True`; then q and k stay in the dtype of the projection.",
            "Allocate `out` with `torch.empty_like(v)`, or leave it out in prefill.",
        ),
        before="""\
call = prefill_inputs(lengths=[51], dtype=torch.bfloat16)
call["k"] = torch.nn.functional.normalize(call["k"].float(), dim=-1)  # float32 now
kdaserve.chunk_kda(**call)""",
        after="""\
call = prefill_inputs(lengths=[51], dtype=torch.bfloat16)
call["k"] = torch.nn.functional.normalize(call["k"].float(), dim=-1).to(call["q"].dtype)
kdaserve.chunk_kda(**call)""",
        validation='assert kdaserve.guards.same_dtype(call["q"], call["k"], call["v"])',
        guard="same_dtype",
        prevention=(
            "Split q, k and v from one packed projection, so that they share its dtype.",
            "Give buffers the dtype of the tensor they are for, never the default dtype.",
        ),
        related=("KDA105",),
    ),
    Entry(
        code="KDA107",
        title="Tensors on different devices",
        raises="ContractError",
        message="{op}: `{argument}` is on {got}, but `{source}` is on {expected}.",
        fix="move `{argument}` to {expected} when it is made, not in the step.",
        meaning="""A kernel reads all its tensors from one device. One tensor of the call lives elsewhere. Nothing is moved
silently, because a copy in every step costs a sync and cannot be part of a CUDA graph.""",
        trigger="`tensor.device` differs from that of the first tensor of the call; or a CUDA graph is captured and `Snapshots` are on the host.",
        situations=(
            "Slot ids or `cu_seqlens` were built on the CPU by the scheduler and not copied to the GPU.",
            "Tensor or pipeline parallel: the pool was allocated on cuda:0 by every rank, without the rank's own device.",
            "A pool swapped out to host memory was not swapped in before the request went on.",
            "A model was loaded with the meta device and one parameter was never filled.",
        ),
        solutions=(
            "Copy the step's metadata once with `.to(device, non_blocking=True)`, before the first layer.",
            "Allocate the pool with `device=q.device`, or after `torch.cuda.set_device(local_rank)`.",
            "Give the host lengths to `kdaserve.plan_prefill(lengths=..., device=...)`; it needs no copy back.",
        ),
        before="""\
call = prefill_inputs(lengths=[51])
call["initial_state"] = call["initial_state"].to("meta")  # a parameter that was never filled
kdaserve.chunk_kda(**call)""",
        after="""\
call = prefill_inputs(lengths=[51])
call["initial_state"] = torch.zeros(call["initial_state"].shape, device=call["q"].device)
kdaserve.chunk_kda(**call)""",
        validation='assert kdaserve.guards.same_device(call["q"], call["initial_state"], call["initial_state_indices"])',
        guard="same_device",
        prevention=(
            "Build all metadata of a step in one object that is moved to the device as a whole.",
            "Pass `device=` to every allocation in engine code; the default device differs between processes.",
        ),
        related=("KDA120", "KDA204"),
    ),
    Entry(
        code="KDA108",
        title="Argument of the wrong type",
        raises="ContractTypeError",
        message="{op}: `{argument}` must be {expected}, got {got}.",
        fix="pass {expected} for `{argument}`.",
        meaning="""An argument is no tensor where one is needed, or no number or flag where one is needed. Lists and arrays are
not converted: that would allocate and copy in every step, and the copy could not be replayed by a CUDA graph.""",
        trigger="""A required tensor is None, a list, a numpy array or a number; or a scalar option is a tensor, a string or None;
or a tensor has no memory of its own.""",
        situations=(
            "Slot ids are passed as the scheduler's Python list.",
            "`lower_bound` or `scale` is read from a checkpoint or a JSON file as a tensor or a string.",
            "A flag is passed as 0 or 1, or a positional argument slipped by one place.",
            "`snapshots` is a plain list of tuples instead of a `kdaserve.Snapshots`.",
            "A projection hands over a DTensor, the storage of a tensor was resized to nothing, or the call is inside a function of `torch.func`.",
        ),
        solutions=(
            "Make tensors once with the step's metadata: `torch.tensor(slots, dtype=torch.int32, device=device)`.",
            "Turn configuration values into Python numbers when the model is loaded: `float(config.gate_lower_bound)`.",
            "Pass everything after `beta` by keyword.",
            "Call with local tensors: `q.to_local()` of a DTensor.",
        ),
        before="""\
call = prefill_inputs(lengths=[51])
call["initial_state_indices"] = [3]
kdaserve.chunk_kda(**call)""",
        after="""\
call = prefill_inputs(lengths=[51])
call["initial_state_indices"] = torch.tensor([0], dtype=torch.int32)
kdaserve.chunk_kda(**call)""",
        validation='assert kdaserve.guards.is_tensor(call["initial_state_indices"])',
        guard="is_tensor",
        prevention=(
            "Run a type checker over engine code; the public functions are fully annotated.",
            "Keep persistent index buffers on the device and fill them with copy_, which also suits CUDA graphs.",
        ),
        related=("KDA101", "KDA105", "KDA124"),
    ),
    Entry(
        code="KDA109",
        title="Last dimension is not contiguous",
        raises="ContractError",
        message="{op}: {arguments} must be contiguous in the last dim. The strides are {got}.",
        fix="split the projection along its last dimension, or call `.contiguous()` on {arguments} once where it is made.",
        meaning="""Rows may have any stride, so views of one packed projection are read in place. Inside a row, neighbours must
be neighbours in memory: kernels load 16 bytes at a time. A transposed or interleaved view has another stride there.""",
        trigger="`tensor.stride(-1) != 1` while the last dimension has more than one entry.",
        situations=(
            "The short convolution works on [channels, tokens], and its output is passed as `.transpose(...)` without a copy.",
            "Interleaved weights: q and k alternate in one projection and are taken as `x[..., ::2]` and `x[..., 1::2]`.",
            "Column-parallel weights are laid out so that heads come last, and the heads were moved by permute.",
        ),
        solutions=(
            "Let the convolution write token-major output; that saves the transpose as well.",
            "Reorder interleaved weights once, when the checkpoint is loaded, so that q | k | v are blocks of columns.",
            "Where the layout cannot change, call `.contiguous()` after the transpose, and keep the copy out of the other layers.",
        ),
        before="""\
call = decode_inputs(batch=2)
call["mixed_qkv"] = call["mixed_qkv"].T.contiguous().T  # output of a channel-major convolution
kdaserve.packed_decode_kda(**call)""",
        after="""\
call = decode_inputs(batch=2)
call["mixed_qkv"] = call["mixed_qkv"].T.contiguous().T.contiguous()
kdaserve.packed_decode_kda(**call)""",
        validation='assert kdaserve.guards.last_dim_contiguous(call["mixed_qkv"], call["a"], call["b"])',
        guard="last_dim_contiguous",
        prevention=(
            "Assert the guard once on the output of the projection and of the convolution, when the model is loaded.",
            "Treat permute and transpose just before a kernel call as a sign that a weight should be laid out anew.",
        ),
        related=("KDA103", "KDA123"),
    ),
    Entry(
        code="KDA110",
        title="Value heads are no multiple of query heads",
        raises="ContractError",
        message="{op}: {v_heads} value heads (HV) are no multiple of {heads} query heads (H).",
        fix="give q and k a head count that divides {v_heads}, or v, g and beta a multiple of {heads}.",
        meaning="""Each query/key head serves HV / H value heads (grouped value attention). With a remainder there is no way to
say which value head belongs to which query head.""",
        trigger="`v.shape[2] % q.shape[2] != 0`, or q has more heads than v.",
        situations=(
            "q and v were swapped, or q was repeated to more heads than v has.",
            "Tensor parallel split the value heads over more ranks than the query heads, so that a rank holds 6 of one and 4 of the other.",
            "The layer confuses the heads of the KDA layers with those of the full-attention layers of the same model.",
        ),
        solutions=(
            "Read both head counts from the configuration of the KDA layer and divide both by the tensor parallel size.",
            "When H is not divisible by the number of ranks, replicate query heads so that every rank has `HV % H == 0`.",
            "Do not repeat q and k to HV heads; the kernel reads each query head for its whole group.",
        ),
        before="""\
call = prefill_inputs(lengths=[51], heads=2)
for name in ("q", "k"):
    call[name] = call[name].repeat(1, 1, 2, 1)[:, :, :3]  # 3 query heads beside 2 value heads
kdaserve.chunk_kda(**call)""",
        after="""\
call = prefill_inputs(lengths=[51], heads=2, v_heads=4)  # two value heads for each query head
kdaserve.chunk_kda(**call)""",
        validation='assert kdaserve.guards.heads_divide(call["q"].shape[2], call["v"].shape[2])',
        guard="heads_divide",
        prevention=(
            "Check both head counts against the tensor parallel size when the model is loaded.",
            "Test one grouped model, such as H = 2 and HV = 4, in every parallel layout that is offered.",
        ),
        related=("KDA104", "KDA117"),
    ),
    Entry(
        code="KDA111",
        title="Head dimension not supported",
        raises="ContractError",
        message="{op}: the head dimension {symbol} is {got}; it must be a multiple of 16 from 16 to 256.",
        fix="pad the dimension {symbol} of the projections to the next multiple of 16 with zeros when the weights are loaded.",
        meaning="""Matrix instructions work on tiles of 16, and a head's state must fit the registers or shared memory of one
multiprocessor. So K and V are multiples of 16, from 16 to 256. Public models use 64, 128 or 256.""",
        trigger="`q.shape[-1]` (K) or `v.shape[-1]` (V) is below 16, above 256 or no multiple of 16.",
        situations=(
            "A toy model or a unit test uses 8 as head dimension.",
            "The head dimension was worked out as hidden_size // heads, which is not the configured one.",
            "Tensor parallel split the head dimension instead of the heads.",
            "q and k still hold two heads side by side because the view that splits heads used the wrong count.",
        ),
        solutions=(
            "Take the head dimensions from the configuration of the KDA layer, and split heads, never head dimensions.",
            "Pad with zero channels: zero keys and values add nothing. Pass `scale=K ** -0.5` with the unpadded K.",
            "Use 16 as the smallest size in tests.",
        ),
        before="""\
call = prefill_inputs(lengths=[51], k_dim=16)
for name in ("q", "k", "g", "initial_state"):
    call[name] = call[name][..., :8].contiguous()
call.update(A_log=None, dt_bias=None, lower_bound=None)
kdaserve.chunk_kda(**call)""",
        after="""\
call = prefill_inputs(lengths=[51], k_dim=16)
kdaserve.chunk_kda(**call)""",
        validation='assert all(kdaserve.guards.head_dim_supported(call[name].shape[-1]) for name in ("q", "v"))',
        guard="head_dim_supported",
        prevention=(
            "Check the head dimensions when the model is loaded, before a request can reach the kernel.",
            "Print K, V, H and HV of the first KDA layer in the engine's start-up log.",
        ),
        related=("KDA104", "KDA110", "KDA203"),
    ),
    Entry(
        code="KDA112",
        title="Gate parameters have the wrong length",
        raises="ContractError",
        message="{op}: `{argument}` has {got} entries; [{symbol}] needs {expected}.",
        fix="pass the {expected} entries of `{argument}` that belong to the value heads of this rank, as [{symbol}].",
        meaning="""`A_log` has one entry for each value head, `dt_bias` one for each channel of each value head, head-major.
Another length means that the kernel would read past the end, or apply the parameters of another head.""",
        trigger="`A_log.shape[0] != HV` or `dt_bias.shape[0] != HV * K`.",
        situations=(
            "`dt_bias` has length HV, as in Mamba2 and gated delta net; KDA has one bias for each channel.",
            "Tensor parallel: the projections are split over ranks, the gate parameters are not.",
            "The checkpoint stores `A_log` as [1, 1, HV, 1], and the loader flattened or sliced the wrong dimension.",
        ),
        solutions=(
            "Split both parameters with the value heads: `A_log[rank * n : (rank + 1) * n]`, and `dt_bias` the same times K.",
            "If the model really has one bias a head, repeat it once when loading: `dt_bias.repeat_interleave(K)`.",
            "Flatten to one dimension when loading: `A_log.reshape(-1)`, `dt_bias.reshape(-1)`.",
        ),
        before="""\
call = prefill_inputs(lengths=[51], heads=2, k_dim=16)
call["dt_bias"] = torch.zeros(2)  # one bias a head
kdaserve.chunk_kda(**call)""",
        after="""\
call = prefill_inputs(lengths=[51], heads=2, k_dim=16)
call["dt_bias"] = torch.zeros(2).repeat_interleave(16)
kdaserve.chunk_kda(**call)""",
        validation='assert kdaserve.guards.gate_parameters_fit(call["A_log"], call["dt_bias"], *call["g"].shape[2:])',
        guard="gate_parameters_fit",
        prevention=(
            "Give `A_log` and `dt_bias` the same sharding rule as the projection of g, and assert their lengths after loading.",
            "Compare one layer with the reference implementation on every rank, not only on rank 0.",
        ),
        related=("KDA104", "KDA105", "KDA113"),
    ),
    Entry(
        code="KDA113",
        title="Gate parameters without A_log",
        raises="ContractError",
        message="{op}: `{argument}` is given, but `A_log` is None, so `g` is taken as log decay and `{argument}` would be ignored.",
        fix="pass `A_log` [HV] along with `{argument}`, or leave `{argument}` out if `g` already is the log decay.",
        meaning="""With `A_log` the kernel computes the decay from raw logits, and `dt_bias` and `lower_bound` are part of that
formula. Without it `g` is used as it is: natural log of the decay, one a token, never cumulative. A bias or a bound beside
such a `g` has no meaning.""",
        trigger="`dt_bias` or `lower_bound` is not None while `A_log` is None.",
        situations=(
            "`A_log` is missing in the checkpoint or was renamed, and the loader left None.",
            "The model computes its gate itself and still passes all gate parameters to the kernel.",
            "A port from a library with a flag such as use_gate_in_kernel dropped `A_log` and kept the rest.",
        ),
        solutions=(
            "Raw logits: pass `A_log`, `dt_bias` and, for the bounded gate, `lower_bound`. The kernel computes the gate in float32.",
            "Gate computed before: pass it in float32 as `g` and leave all three out.",
            "Do not do both: a bias added twice shows up only as poor answers.",
        ),
        before="""\
call = prefill_inputs(lengths=[51])
call["A_log"] = None
kdaserve.chunk_kda(**call)""",
        after="""\
call = prefill_inputs(lengths=[51])
assert call["A_log"] is not None  # raw logits, all gate parameters
kdaserve.chunk_kda(**call)
call = prefill_inputs(lengths=[51], gate="none")  # or log decay and none of them
kdaserve.chunk_kda(**call)""",
        validation="""\
parameters = (call.get(name) for name in ("A_log", "dt_bias", "lower_bound"))
assert kdaserve.guards.gate_is_whole(*parameters)""",
        guard="gate_is_whole",
        prevention=(
            "Decide in one place of the model whether the kernel computes the gate, and build the arguments from that.",
            "Make the loader fail on a missing `A_log`.",
        ),
        related=("KDA112", "KDA114", "KDA305"),
    ),
)

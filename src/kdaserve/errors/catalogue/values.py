"""Errors of what tensors hold (KDA301 to KDA309).

Indices on the CPU are always checked. Everything else needs ``check="values"``, which waits for the GPU.
"""

from kdaserve.errors.entry import Entry

ENTRIES: tuple[Entry, ...] = (
    Entry(
        code="KDA301",
        title="Slot index out of range",
        raises="ValuesError",
        message="{op}: `{argument}`[{position}] is {got}, but the pool has {slots} slots.",
        fix="pass slots below {slots}, or -1 for padding.",
        meaning="""An index names a slot past the end of the pool. Without this check a GPU kernel would read and overwrite
memory that belongs to something else. Negative indices are padding, not an error.""",
        trigger="An index is >= the number of slots. Checked for indices on the CPU, and with `check='values'` on any device.",
        situations=(
            "Slot numbers start from 1 in the engine, because it keeps slot 0 for padding, and the pool has no row more.",
            "The index is a block number of the key/value cache instead of a state slot.",
            "The buffer of a CUDA graph holds stale or uninitialised indices past the real batch.",
            "The pool was made smaller, while a cached prefix still names an old slot.",
        ),
        solutions=(
            "Allocate one slot more, or subtract 1, so that numbering and pool agree.",
            "Fill index buffers with -1 before a graph is captured and in every step past the real batch.",
            "Take slots from `kdaserve.StatePool.allocate` of the same pool.",
        ),
        before="""\
call = prefill_inputs(lengths=[51], slots=4)
call["initial_state_indices"] = torch.tensor([4])  # slots 1 to 4
kdaserve.chunk_kda(**call)""",
        after="""\
call = prefill_inputs(lengths=[51], slots=4)
call["initial_state_indices"] = torch.tensor([4 - 1])  # slots 0 to 3
kdaserve.chunk_kda(**call)""",
        validation='assert kdaserve.guards.slots_in_range(call["initial_state_indices"], len(call["initial_state"]))',
        guard="slots_in_range",
        prevention=(
            "Check indices on the host, where the scheduler makes them, before they are copied to the GPU.",
            "Run the first steps of a new engine version with `check='values'`.",
        ),
        related=("KDA116", "KDA127", "KDA302"),
    ),
    Entry(
        code="KDA302",
        title="Slot named twice",
        raises="ValuesError",
        message="{op}: slot {slot} is named twice, by {first} and by {second}.",
        fix="give every sequence and every snapshot a slot of its own; copy a shared prefix with `StatePool.fork` first.",
        meaning="""Two sequences, or a sequence and a snapshot, would write one slot in the same call. Sequences run side by
side, so the slot would end up with the state of either one, or with a mix, and the result would change from run to run.""",
        trigger="A non-negative slot stands twice in the indices and snapshots of one call.",
        situations=(
            "Requests that share a prefix start from the same cached slot instead of from copies of it.",
            "Two chunks of one long prompt were scheduled into the same step as two sequences.",
            "Padded rows of a graph all point to slot 0; padding is -1.",
            "A slot was freed twice and given to two requests.",
            "A snapshot names the slot of its own sequence to save the final state, which is there anyway.",
        ),
        solutions=(
            "Fork the slot of the shared prefix for each request: `kdaserve.StatePool.fork` copies it at once.",
            "Put all new tokens of a request into one sequence a step.",
            "Use -1 for padding. Slot 0 is an ordinary slot.",
        ),
        before="""\
call = prefill_inputs(lengths=[51, 13], slots=4)
call["initial_state_indices"] = torch.tensor([2, 2])  # a shared prefix
kdaserve.chunk_kda(**call)""",
        after="""\
call = prefill_inputs(lengths=[51, 13], slots=4)
call["initial_state"][3] = call["initial_state"][2]  # what StatePool.fork does
call["initial_state_indices"] = torch.tensor([2, 3])
kdaserve.chunk_kda(**call)""",
        validation='assert kdaserve.guards.slots_unique(call["initial_state_indices"])',
        guard="slots_unique",
        prevention=(
            "Treat a cached prefix as read-only in the scheduler: whoever continues it gets a copy.",
            "Assert that the slots of a batch are unique where the batch is built.",
        ),
        related=("KDA119", "KDA128", "KDA301", "KDA308"),
    ),
    Entry(
        code="KDA303",
        title="cu_seqlens out of order",
        raises="ValuesError",
        message="{op}: `cu_seqlens` {problem}.",
        fix="pass running sums of the lengths from 0: [0, n0, n0 + n1, ...], the last at most the number of rows.",
        meaning="""`cu_seqlens` holds the boundaries of the packed sequences: sequence i owns the rows from entry i up to entry
i + 1. Boundaries start at 0, never decrease, and end at or before the last row. Equal neighbours are fine, they are empty
sequences.""",
        trigger="The first entry is not 0, an entry is smaller than the one before it, or the last is larger than the number of rows.",
        situations=(
            "Lengths were passed instead of their running sums.",
            "The leading 0 is missing, or the boundaries are those of a later part of a larger batch and start elsewhere.",
            "A graph buffer keeps old boundaries past the real sequences; those should repeat the last boundary.",
            "The boundaries count tokens of the whole prompt, while q holds only the current chunk of it.",
        ),
        solutions=(
            "Compute them as `torch.tensor([0, *lengths]).cumsum(0)`, in int32.",
            "For a slice of a batch subtract its first boundary.",
            "Pad unused entries with the last boundary.",
        ),
        before="""\
call = prefill_inputs(lengths=[51, 13])
call["cu_seqlens"] = torch.tensor([0, 51, 13])  # lengths
kdaserve.chunk_kda(**call)""",
        after="""\
call = prefill_inputs(lengths=[51, 13])
call["cu_seqlens"] = torch.tensor([0, 51, 13]).cumsum(0)  # boundaries
kdaserve.chunk_kda(**call)""",
        validation='assert kdaserve.guards.cu_seqlens_ordered(call["cu_seqlens"], rows=call["q"].shape[1])',
        guard="cu_seqlens_ordered",
        prevention=(
            "Keep the lengths on the host and make boundaries and plan from them in one function.",
            "Test graphs with fewer sequences than their capacity.",
        ),
        related=("KDA102", "KDA115", "KDA120", "KDA126"),
    ),
    Entry(
        code="KDA304",
        title="NaN or infinity in an input",
        raises="ValuesError",
        message="{op}: `{argument}` holds {got} at {where}.",
        fix="find what wrote it upstream of the kernel; a slot that holds it must be zeroed before it is used again.",
        meaning="""A token, a parameter or a state that the call reads is not finite. The kernel keeps it inside its sequence,
head and slot, but that state stays NaN for all later tokens of the request, and for the next request if the slot is not
zeroed.""",
        trigger="`check='values'`, and an input holds a NaN or an infinity in a row that is no padding.",
        situations=(
            "The layer before overflowed in float16, or an uninitialised buffer was read.",
            "A slot was reused without zeroing and holds the NaN of an earlier request.",
            "A parameter was never loaded, because it is missing in the checkpoint or on one rank.",
            "A key/value transfer or a swap from host memory had not finished when the step began.",
        ),
        solutions=(
            "Check the layer's input with `kdaserve.guards.all_finite` and go up layer by layer until it is finite.",
            "Take slots from `kdaserve.StatePool.allocate`, which zeroes them.",
            "Use bfloat16 instead of float16 where activations are large.",
            "Wait for the event of the transfer before the step starts.",
        ),
        before="""\
call = prefill_inputs(lengths=[51])
call["v"][0, 7, 1] = float("nan")
kdaserve.chunk_kda(**call, check="values")""",
        after="""\
call = prefill_inputs(lengths=[51])
kdaserve.chunk_kda(**call, check="values")""",
        validation='assert kdaserve.guards.all_finite(*(call[name] for name in ("q", "k", "v", "g", "beta")))',
        guard="all_finite",
        prevention=(
            "Check all parameters for finite values once after loading.",
            "Run a sample of requests with `check='values'` when a model or a quantisation is new.",
        ),
        related=("KDA124", "KDA305", "KDA309"),
    ),
    Entry(
        code="KDA305",
        title="Positive log decay",
        raises="ValuesError",
        message="{op}: `g` is {got} at {where}; without `A_log` it is the log decay, which is at most 0.",
        fix="pass `A_log` and the other gate parameters if `g` is the raw logit, or mend the sign of the log decay.",
        meaning="""Without `A_log` the kernel takes `g` as natural log of the decay of one token. A positive value means that
the state grows with every token; over a long prompt it overflows. Values up to 0 shrink it or leave it.""",
        trigger="`check='values'`, `A_log` is None, and an entry of `g` is above 0.",
        situations=(
            "`g` is the raw output of the gate projection, and `A_log` was not passed.",
            "`g` holds the decay factor in (0, 1] instead of its log.",
            "The minus sign of `-exp(A_log) * softplus(...)` was lost in a port.",
            "Rounding to bfloat16 or a fused kernel turned a tiny negative value into a positive one.",
        ),
        solutions=(
            "Raw logits: pass `A_log`, `dt_bias`, `lower_bound`; the kernel computes the gate.",
            "Factors: pass their log, computed in float32.",
            "Compare one layer's log decay with the model's reference implementation.",
        ),
        before="""\
call = prefill_inputs(lengths=[51], gate="none")
call["g"] = call["g"].exp()  # the decay factor
kdaserve.chunk_kda(**call, check="values")""",
        after="""\
call = prefill_inputs(lengths=[51], gate="none")
call["g"] = call["g"].exp().log()
kdaserve.chunk_kda(**call, check="values")""",
        validation='assert kdaserve.guards.log_decay_nonpositive(call["g"])',
        guard="log_decay_nonpositive",
        prevention=(
            "Leave the gate to the kernel: pass raw logits and parameters.",
            "Name the tensor for what it holds, such as gate_logit or log_decay.",
        ),
        related=("KDA113", "KDA114", "KDA306"),
    ),
    Entry(
        code="KDA306",
        title="beta outside [0, 1]",
        raises="ValuesError",
        message="{op}: `beta` is {got} at {where}; without `beta_is_raw` it is a strength in [0, 1].",
        fix="pass `beta_is_raw=True` if `beta` is the raw logit, or apply the sigmoid in float32 before the call.",
        meaning="""`beta` says how much of a token is written into the state: 0 nothing, 1 all of it. Above 1 or below 0 the
update overshoots, and the state can grow without bound. Raw logits are welcome, but the call must say so.""",
        trigger="`check='values'`, `beta_is_raw` is False, and an entry of `beta` is below 0 or above 1.",
        situations=(
            "The raw output of the beta projection is passed, and the sigmoid was left to the kernel without saying so.",
            "The model allows negative eigenvalues and doubles beta to (0, 2), which this library does not support.",
            "The columns of a fused projection are cut in the wrong order, and `beta` holds gate logits.",
        ),
        solutions=(
            "Pass `beta_is_raw=True`: the sigmoid is then taken in float32, which is also more exact.",
            "Or pass `beta.float().sigmoid()`.",
            "Check the order of the columns against the model's reference implementation.",
        ),
        before="""\
call = prefill_inputs(lengths=[51], beta_is_raw=True)
call["beta_is_raw"] = False
kdaserve.chunk_kda(**call, check="values")""",
        after="""\
call = prefill_inputs(lengths=[51], beta_is_raw=True)
call["beta_is_raw"], call["beta"] = False, call["beta"].sigmoid()
kdaserve.chunk_kda(**call, check="values")""",
        validation='assert call["beta_is_raw"] or kdaserve.guards.beta_in_unit_interval(call["beta"])',
        guard="beta_in_unit_interval",
        prevention=(
            "Use one convention in prefill and decode; packed decode always takes raw logits.",
            "Test that decode after prefill gives the same as one longer prefill: a convention mixed up shows there.",
        ),
        related=("KDA304", "KDA305"),
    ),
    Entry(
        code="KDA307",
        title="Tracked chunk past the end",
        raises="ValuesError",
        message="{op}: `track_chunk_idx`[{sequence}] is {got}, but sequence {sequence} has {chunks} chunks, counted from 0.",
        fix="pass a chunk below {chunks}, or -1 to leave the row; for the state at the very end read the pool or use `snapshots`.",
        meaning="""`track_state` receives the state at the start of a chunk. A sequence of 128 tokens has chunks 0 and 1; the
state after all 128 tokens is no start of a chunk but the final state, which is in the sequence's slot. An empty sequence has
no chunk at all.""",
        trigger="An entry of `track_chunk_idx` is >= the number of chunks of its sequence, `ceil(length / 64)`.",
        situations=(
            "The chunk is computed as length // 64, which is one too many when the length is a multiple of 64.",
            "The prefix cache counts tokens of the whole prompt, and this call holds only a later part of it.",
            "A row of a graph was padded with 0 instead of -1, and its sequence is empty.",
        ),
        solutions=(
            "For a cache point at a multiple of 64 below the length pass tokens // 64.",
            "When the cache point is the end of the call, copy the sequence's slot after the call instead.",
            "Use `kdaserve.Snapshots`: it names tokens, takes the end as well, and writes straight into the pool.",
        ),
        before="""\
call = prefill_inputs(lengths=[128])
call["track_state"] = torch.zeros(1, 2, 16, 16)
call["track_chunk_idx"] = torch.tensor([2])
kdaserve.chunk_kda(**call)""",
        after="""\
call = prefill_inputs(lengths=[128])
call["track_state"] = torch.zeros(1, 2, 16, 16)
call["track_chunk_idx"] = torch.tensor([1])  # the state after 64 tokens
kdaserve.chunk_kda(**call)""",
        validation="""\
lengths = call["cu_seqlens"].diff()
assert kdaserve.guards.chunk_idx_in_range(call["track_chunk_idx"], lengths)""",
        guard="chunk_idx_in_range",
        prevention=(
            "Test prefix caching with lengths of 63, 64, 65, 128 and 130.",
            "Count cache points in tokens of the call, and convert to chunks in one function.",
        ),
        related=("KDA118", "KDA308"),
    ),
    Entry(
        code="KDA308",
        title="Snapshot names a point that cannot be saved",
        raises="ValuesError",
        message="{op}: snapshot {position}: {problem}.",
        fix="name a sequence of this call, a multiple of 64 up to its length or the length itself, and a slot of the pool.",
        meaning="""Inside a prompt the state exists at multiples of 64 tokens, where chunks meet, and at the end. Other points
are never computed. Tokens are counted within this call, from the first row of the sequence.""",
        trigger="A used snapshot (slot >= 0) names tokens between two chunks or past the end, or a sequence or slot that does not exist.",
        situations=(
            "The prefix cache uses pages of 16 or 256 tokens; 16 is no multiple of 64.",
            "In chunked prefill the point is counted from the start of the prompt instead of from the start of this part.",
            "A request had its first tokens found in the cache, so its parts do not start at multiples of 64 of the prompt.",
            "The slot is that of a pool with more rows, or the sequence is a request id instead of its place in the batch.",
        ),
        solutions=(
            "Round down to a multiple of 64: `tokens // 64 * 64`. A prefix of 130 tokens is saved after 128.",
            "Subtract the tokens that earlier parts of the prompt have processed.",
            "Cut prompts into parts of a multiple of 64 tokens, all but the last.",
            "Mark unused rows with a negative slot.",
        ),
        before="""\
call = prefill_inputs(lengths=[130], slots=4)
call["initial_state_indices"] = torch.tensor([0])
save = kdaserve.Snapshots(sequence=[0], tokens=[100], slot=[1])
kdaserve.chunk_kda(**call, snapshots=save)""",
        after="""\
call = prefill_inputs(lengths=[130], slots=4)
call["initial_state_indices"] = torch.tensor([0])
save = kdaserve.Snapshots(sequence=[0], tokens=[100 // 64 * 64], slot=[1])
kdaserve.chunk_kda(**call, snapshots=save)""",
        validation="""\
lengths, slots = call["cu_seqlens"].diff(), len(call["initial_state"])
assert kdaserve.guards.snapshots_fit(save.sequence, save.tokens, save.slot, lengths, slots)""",
        guard="snapshots_fit",
        prevention=(
            "Make the page size of the prefix cache a multiple of 64.",
            "Test that a request continued from a snapshot gives the same output as one that ran from its first token.",
        ),
        related=("KDA119", "KDA302", "KDA307"),
    ),
    Entry(
        code="KDA309",
        title="A backend deviates from the reference",
        raises="ValuesError",
        message="{op}: the {what} of the backend {backend} deviates by {deviation} from the reference at {where}; allowed is {tolerance}.",
        fix="repeat it with `backend='torch'`; if only {backend} deviates, save the call with `kdaserve.testing.save_call` and report it.",
        meaning="""The same call was run on a backend and on the recurrence in float64. The results differ by more than
rounding in the dtypes of the call explains. Either the backend is wrong for this input, or the tolerance asks for more than
the dtypes can hold.""",
        trigger="`kdaserve.testing.verify_call` or `kdaserve check` finds a deviation above the tolerance, or a NaN on one side only.",
        situations=(
            "A tolerance for float32 is used with bfloat16 inputs or a bfloat16 pool.",
            "The input is hostile: equal keys, very strong decay, values in the thousands.",
            "A compiler, driver or GPU that the library was not tested with.",
            "The saved call holds states of an earlier fault, such as NaN or very large values.",
        ),
        solutions=(
            "Leave `tolerance` out: it then follows from the dtypes of the call.",
            "Look at where the worst element is: a whole sequence points to boundaries, one head to gate parameters.",
            "Save the call and run `kdaserve check` on it: it compares every backend that can run it.",
        ),
        before="""\
call, tolerance = prefill_inputs(lengths=[51]), 0.0
kdaserve.testing.verify_call("chunk_kda", call, backend="torch", tolerance=tolerance)""",
        after="""\
call, tolerance = prefill_inputs(lengths=[51]), 1e-4
kdaserve.testing.verify_call("chunk_kda", call, backend="torch", tolerance=tolerance)""",
        validation="""\
def output(backend):
    pool = call["initial_state"].clone()
    return kdaserve.chunk_kda(**{**call, "initial_state": pool}, backend=backend)


deviation = kdaserve.testing.relative_error(output("torch"), output("reference"))
assert kdaserve.guards.within_tolerance(deviation, tolerance)""",
        guard="within_tolerance",
        prevention=(
            "Run `kdaserve check` on every new combination of GPU, driver and torch before it serves.",
            "Judge by the error against float64, not by the difference between two low-precision kernels.",
        ),
        related=("KDA130", "KDA304", "KDA501"),
    ),
)

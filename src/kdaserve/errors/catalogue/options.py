"""Errors of arguments that must fit together: packing, tracking, snapshots, plan, buffers, options (KDA114 to KDA126)."""

from kdaserve.errors.entry import Entry

ENTRIES: tuple[Entry, ...] = (
    Entry(
        code="KDA114",
        title="lower_bound is not a finite negative number",
        raises="ContractError",
        message="{op}: `lower_bound` is {got}; it must be finite and negative.",
        fix="pass the bound of the log decay a token, such as -5.0, or None for the softplus gate.",
        meaning="""The bounded gate is `lower_bound * sigmoid(exp(A_log) * (g + dt_bias))`. Its result is a log decay, which
lies between `lower_bound` and 0. A positive bound would make the state grow with every token, 0 would switch the decay off,
and infinity gives NaN.""",
        trigger="`lower_bound` is zero, positive, infinite or NaN.",
        situations=(
            "The configuration stores the size of the bound, 5.0, and the sign was not added.",
            "0 or -inf is passed to mean no bound; no bound is None.",
            "The bound is given as a decay factor, such as 0.0067, instead of its log.",
        ),
        solutions=(
            "Negate the configured value: `lower_bound=-abs(config.gate_bound)`.",
            "Pass None for models with the softplus gate.",
            "Convert a smallest decay factor with `math.log(factor)`.",
        ),
        before="""\
call = prefill_inputs(lengths=[51], gate="bounded")
call["lower_bound"] = 5.0
kdaserve.chunk_kda(**call)""",
        after="""\
call = prefill_inputs(lengths=[51], gate="bounded")
call["lower_bound"] = -5.0
kdaserve.chunk_kda(**call)""",
        validation='assert kdaserve.guards.lower_bound_is_negative(call["lower_bound"])',
        guard="lower_bound_is_negative",
        prevention=(
            "Check the bound when the configuration is read, where its name and unit are at hand.",
            "Compare the log decay of one token with the reference implementation: raw 0 and A_log 0 at bound -5 give -2.5.",
        ),
        related=("KDA108", "KDA113"),
    ),
    Entry(
        code="KDA115",
        title="cu_seqlens does not describe a packed batch",
        raises="ContractError",
        message="{op}: `cu_seqlens` does not describe this batch: {problem}.",
        fix="pack all tokens into [1, T, ...] and pass their boundaries [N+1] from 0, or leave `cu_seqlens` out for [B, T, ...].",
        meaning="""There are two ways to pass several sequences. Packed: all tokens one after the other in a batch of 1, with
boundaries in `cu_seqlens`. Batched: equal lengths in [B, T, ...] without `cu_seqlens`. The call mixes the two, or the
boundaries are empty.""",
        trigger="`cu_seqlens` is given and `q.shape[0] != 1`, or `cu_seqlens` has no entry at all.",
        situations=(
            "A padded batch [B, T, ...] is passed with the `cu_seqlens` that belong to its packed form.",
            "The batch dimension was added with `unsqueeze(1)` instead of `unsqueeze(0)`.",
            "A step without prefill requests builds boundaries from an empty list; with no sequence they still hold the 0.",
        ),
        solutions=(
            "Packed tokens: `x.unsqueeze(0)` on [T, ...], and lengths summed up from 0 as boundaries.",
            "Equal lengths: leave `cu_seqlens` out; one slot a batch row.",
            "Empty step: pass `torch.zeros(1, dtype=torch.int32)`, or skip the call.",
        ),
        before="""\
call = prefill_inputs(lengths=[64, 64], batched=True)
call["cu_seqlens"] = torch.tensor([0, 64, 128])
kdaserve.chunk_kda(**call)""",
        after="""\
call = prefill_inputs(lengths=[64, 64])  # q is [1, 128, H, K]
call["cu_seqlens"] = torch.tensor([0, 64, 128])
kdaserve.chunk_kda(**call)""",
        validation='assert kdaserve.guards.batch_is_packed(call["q"], call["cu_seqlens"])',
        guard="batch_is_packed",
        prevention=(
            "Use one form in the whole engine; serving needs the packed one.",
            "Build the packed tensors and `cu_seqlens` in the same function.",
        ),
        related=("KDA103", "KDA116", "KDA303"),
    ),
    Entry(
        code="KDA116",
        title="Not one entry per sequence",
        raises="ContractError",
        message="{op}: `{argument}` has {got} entries, but {source} says {expected} sequence(s).",
        fix="describe all sequences with `cu_seqlens` [0, end of the first, ...] or `plan`, and give `{argument}` one entry for each.",
        meaning="""Every sequence of the call needs its own entry: the slot it reads and writes, or the chunk to track. The
number of sequences comes from `cu_seqlens` (its length minus one), or from the batch dimension when there is no `cu_seqlens`.""",
        trigger="An index tensor has more or fewer entries than the call has sequences.",
        situations=(
            "`cu_seqlens` is padded to the capacity of a CUDA graph with empty sequences, and the slot ids are not, or the reverse.",
            "Slot ids of the whole batch are passed to a prefill call that holds only the prefill part of a mixed batch.",
            "`cu_seqlens` was passed without its leading 0, so that one sequence is missing.",
            "`cu_seqlens` was forgotten, and the packed tokens look like one sequence.",
        ),
        solutions=(
            "Slice slot ids and `cu_seqlens` by the same range of requests.",
            "In graphs pad both to the same capacity: repeat the last boundary, and use index -1.",
            "Check that `cu_seqlens[0]` is 0 and `len(cu_seqlens) == len(indices) + 1`.",
        ),
        before="""\
call = prefill_inputs(lengths=[51, 13])
call["initial_state_indices"] = torch.tensor([0, 1, 2])  # slots of the whole batch
kdaserve.chunk_kda(**call)""",
        after="""\
call = prefill_inputs(lengths=[51, 13])
call["initial_state_indices"] = torch.tensor([0, 1, 2])[:2]  # of the prefill requests
kdaserve.chunk_kda(**call)""",
        validation="""\
sequences = len(call["cu_seqlens"]) - 1
assert kdaserve.guards.one_index_per_sequence(call["initial_state_indices"], sequences)""",
        guard="one_index_per_sequence",
        prevention=(
            "Keep slot ids and boundaries in one metadata object that slices both.",
            "Test a mixed batch of prefill and decode requests, and a graph with padded requests.",
        ),
        related=("KDA104", "KDA115", "KDA301"),
    ),
    Entry(
        code="KDA117",
        title="Packed projection has an impossible width",
        raises="ContractError",
        message=(
            "{op}: `mixed_qkv` has width {got}, which is not `2*H*K + HV*V` with HV={v_heads}, K={k_dim}, V={v_dim} "
            "for any H that divides HV. Widths that fit: {expected}."
        ),
        fix="pass q | k | v of this rank's heads and nothing else; or mend the pool and `b`, which set HV, V and K.",
        meaning="""Decode reads q, k and v from one row: `H*K` columns of q, `H*K` of k, `HV*V` of v. HV, V and K come from the pool
and the gates, so the number of query heads H follows from the width. No whole H fits the width that was passed.""",
        trigger="`mixed_qkv.shape[1] - HV*V` is not a positive multiple of `2*K` that gives an H dividing HV.",
        situations=(
            "The projection also holds g, beta or an output gate, and the whole row was passed.",
            "Tensor parallel split q and k otherwise than v, or the pool has the heads of all ranks.",
            "Only v was taken, or q and k were passed with HV heads and v with H.",
            "The short convolution pads its channels to a multiple of a block size.",
        ),
        solutions=(
            "Cut the row to its q | k | v columns; a view with a row stride is read in place.",
            "Check the local H and HV against the widths listed in the message.",
            "Order the columns q, then k, then v, each head-major.",
        ),
        before="""\
call = decode_inputs(batch=2)
call["mixed_qkv"] = torch.cat([call["mixed_qkv"], call["b"]], dim=1)  # q | k | v | beta
kdaserve.packed_decode_kda(**call)""",
        after="""\
call = decode_inputs(batch=2)
width = call["mixed_qkv"].shape[1]
packed = torch.cat([call["mixed_qkv"], call["b"]], dim=1)
call["mixed_qkv"] = packed[:, :width]  # q | k | v
kdaserve.packed_decode_kda(**call)""",
        validation="""\
_, HV, V, K = call["initial_state"].shape
assert kdaserve.guards.packed_width_fits(call["mixed_qkv"].shape[1], HV, K, V)""",
        guard="packed_width_fits",
        prevention=(
            "Compute the width of the projection from H, HV, K and V in one place and assert it when the model is loaded.",
            "Test decode with H different from HV and K different from V.",
        ),
        related=("KDA104", "KDA110"),
    ),
    Entry(
        code="KDA118",
        title="track_state and track_chunk_idx go together",
        raises="ContractError",
        message="{op}: `{present}` is given without `{missing}`.",
        fix="pass `{missing}` too, or neither; for states inside a prompt `snapshots` needs no second buffer.",
        meaning="""`track_state` [N, HV, V, K] receives the state at the start of one chunk of each sequence, and
`track_chunk_idx` [N] says which chunk. One without the other says nothing.""",
        trigger="Exactly one of `track_state` and `track_chunk_idx` is None.",
        situations=(
            "The prefix cache is switched off, and only one of its two buffers is left out.",
            "A capture run allocates the state buffer and fills in the chunk numbers later.",
        ),
        solutions=(
            "Pass both; chunk number -1 leaves the row of a sequence as it was.",
            "Leave both out when no state inside a prompt is wanted.",
            "Use `kdaserve.Snapshots` to write such states straight into pool slots, in the pool's dtype.",
        ),
        before="""\
call = prefill_inputs(lengths=[128])
call["track_state"] = torch.zeros(1, 2, 16, 16)
kdaserve.chunk_kda(**call)""",
        after="""\
call = prefill_inputs(lengths=[128])
call["track_state"] = torch.zeros(1, 2, 16, 16)
call["track_chunk_idx"] = torch.tensor([1])  # the state after 64 tokens
kdaserve.chunk_kda(**call)""",
        validation='assert kdaserve.guards.tracking_is_paired(call.get("track_state"), call.get("track_chunk_idx"))',
        guard="tracking_is_paired",
        prevention=(
            "Keep the two in one object that is either there or None.",
            "In graphs always pass both, with -1 in every row that is not tracked.",
        ),
        related=("KDA116", "KDA307", "KDA308"),
    ),
    Entry(
        code="KDA119",
        title="Snapshots badly built",
        raises="ContractError",
        message="Snapshots: {problem}.",
        fix="pass three lists of integers, or three 1D int32 or int64 tensors, of one length: sequence, tokens, slot.",
        meaning="""`Snapshots` is a table with one row a snapshot: which sequence, after how many of its tokens, into which
pool slot. The three columns must have one length and hold whole numbers.""",
        trigger="The three columns differ in length, are not one-dimensional, or hold anything but integers.",
        situations=(
            "Several snapshots of one sequence: `tokens` has one entry for each, while `sequence` names the sequence once.",
            "A list of (sequence, tokens, slot) tuples is passed as the first argument.",
            "Slots come from a tensor in float or bool, or as None where the cache has no room.",
        ),
        solutions=(
            "Repeat the sequence for each of its snapshots: `Snapshots([0, 0], [64, 128], [5, 6])`.",
            "Turn rows into columns: `Snapshots(*map(list, zip(*rows)))`.",
            "Mark an unused row with a negative slot, not with None.",
        ),
        before="""\
columns = {"sequence": [0], "tokens": [64, 128], "slot": [5, 6]}
kdaserve.Snapshots(**columns)""",
        after="""\
columns = {"sequence": [0, 0], "tokens": [64, 128], "slot": [5, 6]}
kdaserve.Snapshots(**columns)""",
        validation="assert kdaserve.guards.snapshots_are_parallel(**columns)",
        guard="snapshots_are_parallel",
        prevention=(
            "Build the three columns in one loop that appends to all of them.",
            "For CUDA graphs allocate three tensors of fixed capacity and fill unused rows with slot -1.",
        ),
        related=("KDA302", "KDA308"),
    ),
    Entry(
        code="KDA120",
        title="Plan does not fit the call",
        raises="ContractError",
        message="{op}: the plan does not fit this call: {problem}.",
        fix="make the plan from this step's boundaries: `kdaserve.plan_prefill(cu_seqlens)`, once a step.",
        meaning="""A plan holds the chunk tables of one step: how many sequences there are and where their chunks lie. It may
be shared by all layers of that step, and by no other step. This one was made for other sequences, or lives on another device.""",
        trigger="The plan has another number of sequences, other lengths, more tokens than q has rows, or another device than q.",
        situations=(
            "The plan of the previous step was kept because only the tokens changed, not the number of requests.",
            "The plan was made before the scheduler dropped or preempted a request.",
            "Prefill and decode requests are mixed, and the plan was made from the boundaries of the whole batch.",
            "Pipeline or tensor parallel: one plan was made on rank 0's device and sent to every rank.",
        ),
        solutions=(
            "Make the plan when the batch is final, next to `cu_seqlens`, and drop both after the step.",
            "Pass the host lengths to `plan_prefill(lengths=..., device=...)`: it then costs no sync.",
            "Make one plan for each device.",
        ),
        before="""\
call = prefill_inputs(lengths=[51])
plan = kdaserve.plan_prefill(lengths=[51, 13])  # of the step before
kdaserve.chunk_kda(**call, plan=plan)""",
        after="""\
call = prefill_inputs(lengths=[51])
plan = kdaserve.plan_prefill(call["cu_seqlens"])
kdaserve.chunk_kda(**call, plan=plan)""",
        validation="""\
sequences, rows = len(call["cu_seqlens"]) - 1, call["q"].shape[1]
assert kdaserve.guards.plan_fits(plan, sequences, rows)""",
        guard="plan_fits",
        prevention=(
            "Store plan and `cu_seqlens` in the same metadata object, made by one function.",
            "Never cache a plan by the number of requests or of tokens; make it anew for every step.",
        ),
        related=("KDA107", "KDA116", "KDA126", "KDA303"),
    ),
    Entry(
        code="KDA121",
        title="out overlaps an input",
        raises="ContractError",
        message="{op}: `{written}` shares memory with {argument}, which would be overwritten while it is still used.",
        fix="give `{written}` memory of its own, such as `torch.empty`; only `out=v`, the very same view, may be shared.",
        meaning="""Different parts of a kernel run at the same time. When the output lies on top of an input, one part
overwrites what another has yet to read, and the result changes from run to run. The one exception is `out=v`: each tile of v
is read before its output is written.""",
        trigger="""The memory of `out` and of an input overlap (q, k, g, beta, the pool, or another view of v's memory), or that of
`track_state` and of the pool, or elements of `out` among themselves (an expanded tensor).""",
        situations=(
            "To save memory the output is written into the packed projection, over the columns of q.",
            "`out` is a view of v that is shifted by some rows, because the output buffer starts at another token.",
            "A workspace hands out the same bytes twice, for the output and for the gates.",
        ),
        solutions=(
            "Leave `out` out; the allocator reuses memory from step to step anyway.",
            "For graphs allocate one output buffer a layer, or one shared by all layers whose output is consumed at once.",
            "If saving memory is the aim, pass `out=v`.",
        ),
        before="""\
call = prefill_inputs(lengths=[51])
call["out"] = call["q"]
kdaserve.chunk_kda(**call)""",
        after="""\
call = prefill_inputs(lengths=[51])
call["out"] = torch.empty_like(call["v"])
kdaserve.chunk_kda(**call)""",
        validation="""\
inputs = [call[name] for name in ("q", "k", "v", "g", "beta", "initial_state")]
assert kdaserve.guards.out_does_not_overlap(call["out"], *inputs)""",
        guard="out_does_not_overlap",
        prevention=(
            "Let the workspace of the engine track who uses which bytes until the layer has finished.",
            "Compare a run with `out` and one without, bit by bit, in a test.",
        ),
        related=("KDA104", "KDA106", "KDA122"),
    ),
    Entry(
        code="KDA122",
        title="Tensor cannot be updated in place",
        raises="ContractError",
        message=(
            "{op}: `{argument}` would be updated in place, but it is a leaf tensor that requires grad, or an inference tensor outside inference mode."
        ),
        fix="serve under `torch.inference_mode()`; for training pass `{argument}.clone()`, which keeps the gradient.",
        meaning="""The pool and output buffers are written in place. Autograd forbids that for a leaf that requires a gradient,
because the value the gradient belongs to would be lost, and for a tensor made under inference mode once that mode is left. A
clone is neither: it is updated in place, and the gradient flows to the original.""",
        trigger="`initial_state`, `out` or `track_state` is a leaf with `requires_grad=True` while gradients are on, or an inference tensor.",
        situations=(
            "A learnt initial state (an `nn.Parameter`) is passed as the pool while training or testing gradients.",
            "gradcheck makes every tensor of the call require a gradient.",
            "The pool is registered as a parameter instead of a buffer, and serving runs without `no_grad`.",
            "The pool was allocated under `torch.inference_mode()`, and a test or a warm-up calls the kernel outside of it.",
        ),
        solutions=(
            "Training: pass `pool.clone()`; its gradient reaches the original pool.",
            "Serving: allocate the pool and call the model under `torch.inference_mode()`.",
            "Register the pool as a buffer, or keep it outside the module.",
        ),
        before="""\
call = prefill_inputs(lengths=[51])
call["initial_state"].requires_grad_()
kdaserve.chunk_kda(**call)""",
        after="""\
call = prefill_inputs(lengths=[51])
pool = call["initial_state"].requires_grad_()
call["initial_state"] = pool.clone()
kdaserve.chunk_kda(**call).sum().backward()
assert pool.grad is not None""",
        validation='assert kdaserve.guards.can_update_in_place(call["initial_state"])',
        guard="can_update_in_place",
        prevention=(
            "Keep state that is written by kernels out of `nn.Parameter`.",
            "Run the serving path under inference mode in tests as well.",
        ),
        related=("KDA121", "KDA203"),
    ),
    Entry(
        code="KDA123",
        title="Pool is not dense inside a slot",
        raises="ContractError",
        message="{op}: `{argument}` of shape {shape} has strides {got}; [HV, V, K] in a slot must be contiguous, and slots must not overlap.",
        fix="keep states as [HV, V, K] with K contiguous; only the stride from slot to slot is free. Replace `expand` by `repeat`.",
        meaning="""A slot is read and written as one block: K is contiguous, V has stride K, HV has stride `V*K`. Slots may lie
any distance apart, so a pool can be a column of a larger cache page, but they must not share memory: two requests would then
share one state.""",
        trigger="A stride inside a slot differs from that of a contiguous [HV, V, K], or the slot stride is smaller than a slot.",
        situations=(
            "The pool is kept as [slots, HV, K, V] and passed as `.transpose(-1, -2)`.",
            "One initial state is spread over all slots with `expand`: every slot is the same memory, slot stride 0.",
            "Heads come first in the engine's cache, [HV, slots, V, K], and the pool is a permuted view of it.",
            "The slots overlap because as_strided got the slot stride in bytes, or the other way round.",
        ),
        solutions=(
            "Allocate [slots, HV, V, K], or use `kdaserve.StatePool`, and convert old states once.",
            "Use `state.repeat(slots, 1, 1, 1)` instead of `expand`.",
            "If the cache page holds more than the state, keep the state in one piece: `page.view(slots, -1)[:, a:b].view(slots, HV, V, K)`.",
        ),
        before="""\
call = prefill_inputs(lengths=[51])
call["initial_state"] = torch.zeros(2, 16, 16).expand(4, 2, 16, 16)
call["initial_state_indices"] = torch.tensor([3])
kdaserve.chunk_kda(**call)""",
        after="""\
call = prefill_inputs(lengths=[51])
call["initial_state"] = torch.zeros(2, 16, 16).repeat(4, 1, 1, 1)
call["initial_state_indices"] = torch.tensor([3])
kdaserve.chunk_kda(**call)""",
        validation='assert kdaserve.guards.pool_is_dense(call["initial_state"])',
        guard="pool_is_dense",
        prevention=(
            "Check the strides once, where the pool is allocated.",
            "Test with a state that is not symmetric and V different from K, so that [V, K] and [K, V] cannot be confused.",
        ),
        related=("KDA104", "KDA109"),
    ),
    Entry(
        code="KDA124",
        title="scale is not a finite number",
        raises="ContractError",
        message="{op}: `scale` is {got}; it must be a finite number.",
        fix="pass a finite float, or None for `K ** -0.5`.",
        meaning="""`scale` multiplies every output. Infinity or NaN would turn all outputs of the step into NaN, while the
states stay right, which makes the fault hard to find later.""",
        trigger="`scale` is infinite or NaN.",
        situations=(
            "The scale was computed from a head dimension that is 0 in an unfilled configuration.",
            "A division by a learnt or calibrated value of 0, in a quantised model.",
        ),
        solutions=(
            "Leave `scale` out in prefill, or pass None: `K ** -0.5` is used, with K from the tensors.",
            "Compute it from the local K when the model is loaded, and check it there.",
        ),
        before="""\
call = prefill_inputs(lengths=[51])
call["scale"] = float("inf")
kdaserve.chunk_kda(**call)""",
        after="""\
call = prefill_inputs(lengths=[51])
call["scale"] = 16 ** -0.5
kdaserve.chunk_kda(**call)""",
        validation='assert kdaserve.guards.is_finite_number(call["scale"])',
        guard="is_finite_number",
        prevention=("Read the scale from the configuration once and let the loader refuse a value that is not finite.",),
        related=("KDA108", "KDA304"),
    ),
    Entry(
        code="KDA125",
        title="Unknown option value",
        raises="ContractError",
        message="{op}: `{option}` is {got}; it must be one of: {expected}.",
        fix="pass one of {expected} as `{option}`.",
        meaning="""An option that takes one of a few names got another. Nothing is guessed from a similar name, because a
misspelt option would otherwise run with a default that nobody asked for.""",
        trigger="`check`, the name of an op, or another named option is none of the values that the message lists.",
        situations=(
            "`check=True` or `check=False` is passed; the levels are names.",
            "A configuration file holds 'Values' or 'full'.",
            "`explain_choice` or `verify_call` gets the name of a function of another library.",
        ),
        solutions=(
            "Use `check='shapes'` (the default) in serving, and 'values' while looking for a fault.",
            "Name ops as they are called: chunk_kda, recurrent_kda, packed_decode_kda.",
        ),
        before="""\
call = prefill_inputs(lengths=[51])
check = "full"
kdaserve.chunk_kda(**call, check=check)""",
        after="""\
call = prefill_inputs(lengths=[51])
check = "values"
kdaserve.chunk_kda(**call, check=check)""",
        validation='assert kdaserve.guards.is_one_of(check, ("shapes", "values"))',
        guard="is_one_of",
        prevention=("Check option values where the configuration is read, so that a wrong one stops the start and not a request.",),
        related=("KDA108", "KDA201"),
    ),
    Entry(
        code="KDA126",
        title="plan_prefill called wrongly",
        raises="ContractError",
        message="plan_prefill: {problem}.",
        fix="pass either `cu_seqlens` (1D int32 or int64 tensor from 0) or `lengths` (whole numbers >= 0).",
        meaning="""The plan is made from the boundaries of the packed sequences, or from their lengths on the host. It takes
exactly one of the two: with both, they could contradict each other.""",
        trigger="Both or neither are given, a length is negative or no integer, or `cu_seqlens` is no 1D integer tensor.",
        situations=(
            "`cu_seqlens` is None because the batch is not packed; then the lengths are `[T] * B`.",
            "Lengths are passed as a tensor on the GPU, or as the first, positional argument.",
            "A length is negative because the tokens already in the prefix cache were subtracted twice.",
        ),
        solutions=(
            "With host lengths at hand pass `lengths=[...]` and `device=...`; this needs no sync.",
            "With boundaries only, pass cu_seqlens; on a GPU this is the one sync of the step.",
            "Let the scheduler keep lengths as Python integers.",
        ),
        before="""\
arguments = {"cu_seqlens": torch.tensor([0, 51]), "lengths": [51]}
kdaserve.plan_prefill(**arguments)""",
        after="""\
arguments = {"cu_seqlens": None, "lengths": [51]}
kdaserve.plan_prefill(**arguments)""",
        validation="assert kdaserve.guards.lengths_are_plannable(**arguments)",
        guard="lengths_are_plannable",
        prevention=("Call plan_prefill in one place, from the same lengths that the tokens are packed with.",),
        related=("KDA120", "KDA303"),
    ),
)

"""Errors of the state pool and of the tools around a call: saved calls and error codes (KDA127 to KDA131)."""

from kdaserve.errors.entry import Entry

ENTRIES: tuple[Entry, ...] = (
    Entry(
        code="KDA127",
        title="State pool exhausted",
        raises="PoolError",
        message="StatePool: all {total} slots are taken.",
        fix="free slots of finished requests or cached prefixes first, admit fewer requests, or make the pool larger.",
        meaning="""Every running request and every cached prefix holds one slot. All slots are taken. Unlike a key/value cache
a state cannot be cut into pages or shortened, so the request has to wait, or another one has to give up its slot.""",
        trigger="`StatePool.allocate` or `StatePool.fork` is called while no slot is free.",
        situations=(
            "The scheduler admits requests by the room in the key/value cache alone, and does not ask the state pool.",
            "Saved prefixes are never evicted and hold slots without bound.",
            "Aborted or timed-out requests return their key/value pages, and not their slot.",
            "Speculative decoding or beam search forks a slot for each branch; the pool was sized for one slot a request.",
        ),
        solutions=(
            "Ask `pool.free_slots` before a request is admitted, and queue it when there is none.",
            "Evict the least recently used saved prefix when the pool runs low.",
            "Free slots in the one function that ends a request, whatever the reason.",
            "Size the pool: running requests + saved prefixes + branches. One slot costs `layers * HV * V * K` elements.",
        ),
        before="""\
pool = kdaserve.StatePool(1, layers=1, v_heads=2, k_dim=16, v_dim=16)
requests = [pool.allocate() for _ in range(2)]""",
        after="""\
pool = kdaserve.StatePool(4, layers=1, v_heads=2, k_dim=16, v_dim=16)
requests = [pool.allocate() for _ in range(2)]""",
        validation="assert kdaserve.guards.pool_has_room(pool, requests=1)",
        guard="pool_has_room",
        prevention=(
            "Make free state slots an admission criterion of the scheduler, beside key/value pages.",
            "Export the number of free slots as a metric, and alert before it reaches 0.",
        ),
        related=("KDA128", "KDA129", "KDA301"),
    ),
    Entry(
        code="KDA128",
        title="Slot is not allocated",
        raises="PoolError",
        message="StatePool.{operation}: {slot} is no allocated slot.",
        fix="use the integers that `allocate` and `fork` return, until they are freed; `int(...)` an element of a tensor.",
        meaning="""The operation names a slot that nobody holds at the moment. Going on would free the slot of a request twice,
and two later requests would then get the same slot and overwrite each other's state.""",
        trigger="`free`, `copy` or `fork` gets a slot that was freed already, never allocated, out of range or of another pool.",
        situations=(
            "A request finishes and is aborted in the same step; both paths free its slot.",
            "The parent of a branch is freed before the branch is forked from it.",
            "The slot is an element of an index tensor; slots are Python integers here.",
            "The slot belongs to the pool of another rank or of the draft model.",
            "-1, the mark of padding, is passed on as a slot.",
        ),
        solutions=(
            "Let one owner hold the slot, and set it to None when it is freed.",
            "Fork first, then free the parent.",
            "Turn tensor elements into integers with `int(slot)`; keep slots on the host in the scheduler.",
        ),
        before="""\
pool = kdaserve.StatePool(4, layers=1, v_heads=2, k_dim=16, v_dim=16)
slot = pool.allocate()
held = {slot}
held.remove(slot)
pool.free(slot)  # the parent has finished
pool.fork(slot)""",
        after="""\
pool = kdaserve.StatePool(4, layers=1, v_heads=2, k_dim=16, v_dim=16)
slot = pool.allocate()
held = {slot}
held.add(pool.fork(slot))  # fork first, free the parent later""",
        validation="assert kdaserve.guards.slot_is_held(slot, held)",
        guard="slot_is_held",
        prevention=(
            "End requests in one function that may be called twice, and that frees the slot only the first time.",
            "Test abort during prefill, abort during decode, and finish and abort in one step.",
        ),
        related=("KDA127", "KDA301", "KDA302"),
    ),
    Entry(
        code="KDA129",
        title="StatePool built with a bad size",
        raises="ContractError",
        message="StatePool: `{argument}` is {got}; it must be {expected}.",
        fix="pass {expected} as `{argument}`.",
        meaning="""A size or dtype of the pool cannot be used by the kernels. It is refused when the pool is made, before a
server has started, rather than at its first request.""",
        trigger="A count is no whole number or too small, a head dimension is no multiple of 16 up to 256, or a dtype is not floating.",
        situations=(
            "The number of slots comes from free memory divided by bytes a slot, and is a float, or 0 on a full GPU.",
            "HV // tensor_parallel_size is 0 because there are more ranks than value heads.",
            "Sizes are read from a configuration where they are strings or missing.",
            "The dtype of quantised weights, such as float8, is used for the state as well.",
        ),
        solutions=(
            "Round down to an integer, and refuse to start when fewer slots fit than requests are to run.",
            "Replicate value heads when there are more ranks than heads.",
            "Keep the state in float32, or in bfloat16 after measuring the error over long decodes.",
        ),
        before="""\
sizes = {"slots": 1e9 / 2**20, "layers": 1, "v_heads": 2, "k_dim": 16, "v_dim": 16}
kdaserve.StatePool(**sizes)""",
        after="""\
sizes = {"slots": int(1e9 / 2**20), "layers": 1, "v_heads": 2, "k_dim": 16, "v_dim": 16}
kdaserve.StatePool(**sizes)""",
        validation="assert kdaserve.guards.pool_sizes_fit(**sizes)",
        guard="pool_sizes_fit",
        prevention=(
            "Log slots, bytes a slot and total bytes at start-up.",
            "Derive all sizes from the model's configuration and the parallel layout in one function with tests.",
        ),
        related=("KDA111", "KDA127"),
    ),
    Entry(
        code="KDA130",
        title="Saved call cannot be read",
        raises="ContractError",
        message="{path} is no saved call: {problem}.",
        fix="pass the path that `kdaserve.testing.save_call` returned; its .safetensors and .json file belong side by side.",
        meaning="""`kdaserve.testing.save_call` writes the tensors of a call to a .safetensors file and the rest to a .json file
beside it, so that a fault can be repeated elsewhere. One of the two does not exist, is incomplete, or holds something else.""",
        trigger="`kdaserve.testing.load_call` or `kdaserve check` cannot turn the file into a call.",
        situations=(
            "Only the .safetensors file was copied from the server, without its .json file.",
            "The path is relative to another working directory, or to another container.",
            "The process that saved the call was killed while it wrote, or the disk was full.",
            "The file is a checkpoint or a tensor saved by other means.",
            "The call was saved by a version that writes another format.",
        ),
        solutions=(
            "Copy both files, and check their sizes against those on the machine where the call was saved.",
            "Save the call again.",
            "Read it with the version of kdaserve that wrote it.",
        ),
        before="""\
path = "no-such-directory/call"
kdaserve.testing.load_call(path)""",
        after="""\
import tempfile

path = f"{tempfile.mkdtemp()}/call"
kdaserve.testing.save_call(path, "chunk_kda", prefill_inputs(lengths=[51]))
kdaserve.testing.load_call(path)""",
        validation="assert kdaserve.guards.saved_call_is_there(path)",
        guard="saved_call_is_there",
        prevention=(
            "Load a saved call once where it was saved, before it is sent on.",
            "Record version, GPU and checksum next to the file.",
        ),
        related=("KDA309", "KDA501"),
    ),
    Entry(
        code="KDA131",
        title="No such error code",
        raises="ContractError",
        message="There is no error code {got}. Known codes: {known}.",
        fix="use a code as it stands in brackets at the start of a message, such as KDA102.",
        meaning="""Codes are KDA and three digits: 1xx for the contract of a call, 2xx for backends, 3xx for values in tensors,
4xx for tuning, 5xx for faults of this library. The code that was asked for is none of them, or is of another version.""",
        trigger="`kdaserve.explain` or `kdaserve explain` gets a code that is not in the catalogue.",
        situations=(
            "A code in a log was written by a newer version than the one installed here.",
            "A digit is missing, or the brackets were copied along.",
        ),
        solutions=(
            "Run `kdaserve explain` without a code to list all of them.",
            "Look the code up with the version that wrote the log.",
        ),
        before="""\
code = "KDA999"
kdaserve.explain(code)""",
        after="""\
code = "KDA102"
kdaserve.explain(code)""",
        validation="assert kdaserve.guards.is_one_of(code, kdaserve.errors.CATALOGUE)",
        guard="is_one_of",
        prevention=("Take the code from the attribute `code` of the exception instead of from its text.",),
        related=("KDA125", "KDA501"),
    ),
)

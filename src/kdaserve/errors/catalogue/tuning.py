"""Errors of tuned configurations (KDA401)."""

from kdaserve.errors.entry import Entry

ENTRIES: tuple[Entry, ...] = (
    Entry(
        code="KDA401",
        title="A file of tuned configurations cannot be used",
        raises="TuningError",
        message="the tuned configurations in {path} cannot be used: {problem}.",
        fix="move the file away, or write it anew with `kdaserve tune helion`.",
        meaning="""The backend `helion` looks for configurations that were tuned on this GPU in one file: the one that the environment
variable KDASERVE_HELION_CONFIGS names, else helion.json in the folder kdaserve of the user's configuration. The file is there, but it is
damaged or of another format. It is not passed over, because whoever tuned would then measure the wrong kernels without a word.""",
        trigger="A call on the backend `helion` needs a kernel for the first time, or `kdaserve tune helion` wants to add to the file.",
        situations=(
            "The file was edited by hand, and a comma or a field is missing.",
            "KDASERVE_HELION_CONFIGS names another file, such as one that Helion itself wrote.",
            "A newer Helion does not know a field of a configuration, or asks for another length of a list.",
        ),
        solutions=(
            "Read the problem in the message; mend the entry, or delete it: a kernel without an entry uses the shipped configuration.",
            "Tune again on this machine: `kdaserve tune helion --help` lists the options.",
            "Set KDASERVE_HELION_CONFIGS to a file that does not exist to run with the shipped configurations alone.",
        ),
        before="""\
import json
import tempfile
from pathlib import Path

from kdaserve.ops.helion import tuned

path = Path(tempfile.gettempdir(), "damaged_configurations.json")
path.write_text(json.dumps({"num_warps": 4}))  # a configuration alone, without what it is for
tuned.read(path)""",
        after="""\
import json
import tempfile
from pathlib import Path

from kdaserve.ops.helion import tuned

path = Path(tempfile.gettempdir(), "mended_configurations.json")
what = {"kernel": "chain_kernel", "gpu": "NVIDIA H200", "dtypes": ["bfloat16"], "constants": {"K": 128}}
path.write_text(json.dumps([{**what, "config": {"num_warps": 4}, "evidence": {"milliseconds": 0.3}}]))
tuned.read(path)""",
        validation="assert kdaserve.guards.configurations_fit(json.loads(path.read_text()))",
        guard="configurations_fit",
        prevention=(
            "Let `kdaserve tune helion` write the file, and keep it under version control beside the versions it was tuned with.",
            "Run `kdaserve warmup --backend helion` when a server starts: it reads the file before requests come.",
        ),
        related=("KDA202", "KDA501"),
    ),
)

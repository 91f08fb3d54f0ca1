"""Every error of the library, by code. One module a theme, in the order of the codes."""

from kdaserve.errors.catalogue import backend, call, internal, options, pool, tuning, values
from kdaserve.errors.entry import Entry

CATALOGUE: dict[str, Entry] = {entry.code: entry for module in (call, options, pool, backend, values, tuning, internal) for entry in module.ENTRIES}

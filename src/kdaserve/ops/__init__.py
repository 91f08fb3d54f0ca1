"""One folder an op; its `api` module is the only public one."""

# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint docs bench clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,docs,helion]'
	# A CUDA build of torch brings the triton it needs; beside a CPU build one is wanted for its interpreter alone.
	$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install --quiet 'triton==3.6.0; platform_system == "Linux"'
	touch $@

demo: .venv/installed
	$(BIN)/kdaserve demo

test: .venv/installed
	# One thread each: those of numpy and torch would only wait for each other. Tests take from microseconds to a minute, so idle workers take from others.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: .venv/installed
	$(BIN)/kdaserve bench cpu

clean:
	rm -rf .venv site

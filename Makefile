# make install   a virtual environment in .venv with everything the project needs, from the lock for this machine
# make serve     the server with the built-in model and its adapters (ARGS="…" are passed on to `tandem serve`)
# make test      all tests (ARGS="…" are passed on to pytest)
# make check     format, lint, types, import rules, the map of the modules
# make format    rewrite the sources in the project's format, and the map of modules
# make lock      renew locks/ from pyproject.toml

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=

.DEFAULT_GOAL := serve
.PHONY: install serve test check format lock

install: $(STAMP)

$(STAMP): pyproject.toml scripts/install.sh $(wildcard locks/*.txt)
	@scripts/install.sh $(VENV)
	@touch $@

serve: $(STAMP)
	@exec $(BIN)/tandem serve $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/unit/test_architecture.py

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python scripts/module_map.py

lock: $(STAMP)
	@scripts/lock.sh $(or $(wildcard $(BIN)/uv),uv)

# make install   a virtual environment in .venv with everything the project needs, from the lock for this machine
# make serve     the server with the built-in model, its adapters, and those that are put into the folder adapters
#                (ARGS="…" are passed on to `tandem serve`)
# make test      the tests, on all cores (ARGS="…" are passed on to pytest), with the clients and mlx-vlm installed
# make programs  the tests that run other programs, and the commands and examples of the pages, in the same way
# make test-browser  the page in a headless Chromium, which is installed if there is none
# make clients   try every client of tests/clients and write docs/compatibility.md and docs/refusals.md
# make mutants   change single lines, one at a time, and see whether the tests notice (ARGS="--only WORD --jobs N")
# make quick     the quick ones among the tests of what differs from the branch main (ARGS="…" as above)
# make check     format, lint, types, import rules, the map of the modules
# make format    rewrite the sources in the project's format, the map of modules and the table of parameters
# make lock      renew locks/ from pyproject.toml
# make bench     all benchmarks into benchmarks/results, then the figures of README and docs; VLLM_MLX=path adds that peer
# make figures   the figures of README and docs from benchmarks/results
# make demo-svg  record `tandem demo` into docs/demo.svg
# make pictures  take the pictures of the page into docs/

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CLIENTS := $(VENV)/.clients
ARGS ?=
VLLM_MLX ?=
RESULTS := benchmarks/results
REPORT := $(VENV)/clients.xml
PYTEST := $(BIN)/python -m pytest -n auto --dist loadscope

# A run of the tests starts hundreds of processes; each would compile the sources for itself.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := serve
.PHONY: install serve test programs test-browser clients mutants quick check format lock bench figures demo-svg pictures

install: $(STAMP)

$(STAMP): pyproject.toml scripts/install.sh $(wildcard locks/*.txt)
	@scripts/install.sh $(VENV)
	@touch $@

$(CLIENTS): $(STAMP) tests/clients/npm/package-lock.json
	@scripts/install.sh $(VENV) clients vision
	@touch $@

serve: $(STAMP)
	@mkdir -p adapters
	@exec $(BIN)/tandem serve --adapter-root adapters $(ARGS)

test: $(CLIENTS)
	$(PYTEST) --no-loadscope-reorder -m "not programs and not browser" $(ARGS)

programs: $(CLIENTS)
	$(PYTEST) -m programs $(ARGS)

test-browser: $(CLIENTS)
	@scripts/install_browser.sh $(VENV)
	$(BIN)/python -m pytest -m browser tests/page $(ARGS)

clients: $(CLIENTS)
	$(BIN)/python -m scripts.refusals
	$(BIN)/python -m pytest tests/clients --junitxml=$(REPORT) $(ARGS); status=$$?; \
	    $(BIN)/python -m scripts.compatibility $(REPORT) && exit $$status

mutants: $(STAMP)
	$(BIN)/python scripts/mutants.py $(ARGS)

quick: $(STAMP)
	$(BIN)/python -m pytest -n auto -m "not slow and not restarts and not programs and not browser" $$($(BIN)/python scripts/quick_tests.py) $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@$(BIN)/mypy & types=$$!; \
	    $(BIN)/lint-imports && $(BIN)/python -m pytest -q tests/unit/test_architecture.py; rules=$$?; \
	    wait $$types && exit $$rules

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python scripts/module_map.py
	$(BIN)/python scripts/parameter_table.py

lock: $(STAMP)
	@scripts/lock.sh $(or $(wildcard $(BIN)/uv),uv)

bench: $(STAMP)
	$(BIN)/tandem bench engine --shape 0.13m --repeats 5 --json-out $(RESULTS)/engine-0.13m.json
	$(BIN)/tandem bench engine --shape 4m --repeats 5 --json-out $(RESULTS)/engine-4m.json
	$(BIN)/python benchmarks/peers.py $(if $(VLLM_MLX),--vllm-mlx $(VLLM_MLX)) --json-out $(RESULTS)/peers.json
	$(BIN)/python benchmarks/adapters.py --shape 0.13m --json-out $(RESULTS)/adapters-0.13m.json
	$(BIN)/python benchmarks/adapters.py --shape 4m --json-out $(RESULTS)/adapters-4m.json
	$(BIN)/python benchmarks/long_prompt.py --json-out $(RESULTS)/long_prompt.json
	$(BIN)/python benchmarks/first_byte.py --json-out $(RESULTS)/first_byte.json
	$(BIN)/python benchmarks/prefix.py --json-out $(RESULTS)/prefix.json
	$(BIN)/python benchmarks/hybrids.py --json-out $(RESULTS)/hybrids.json
	$(BIN)/python benchmarks/registry.py --json-out $(RESULTS)/registry.json
	$(BIN)/python benchmarks/hot_swap.py --json-out $(RESULTS)/hot_swap.json
	$(BIN)/python benchmarks/overload.py --json-out $(RESULTS)/overload.json
	$(BIN)/python benchmarks/tenants.py --json-out $(RESULTS)/tenants.json
	$(BIN)/python benchmarks/engine_memory.py --json-out $(RESULTS)/engine_memory.json
	$(BIN)/python benchmarks/tokenize_load.py --json-out $(RESULTS)/tokenize_load.json
	$(BIN)/python benchmarks/structured.py --json-out $(RESULTS)/structured.json
	$(BIN)/python benchmarks/schemas.py --json-out $(RESULTS)/schemas.json
	@$(MAKE) figures

figures: $(STAMP)
	$(BIN)/python scripts/figures.py

demo-svg: $(STAMP)
	$(BIN)/python scripts/record_demo.py docs/demo.svg

pictures: $(CLIENTS)
	@scripts/install_browser.sh $(VENV)
	$(BIN)/python -m scripts.record_page docs

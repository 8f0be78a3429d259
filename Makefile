# make quickstart   GRPO and DPH-JS from one base on the embedded default, and their comparison: table, picture, sentences
# make study        the methods of study/study.toml over seeds: METHODS=grpo,dph_js SEEDS=2 pick some, STUDY=FILE another
#                   study, see docs/study.md
# make test         the tests
# make check        ruff and mypy
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

STUDY ?=
METHODS ?=
SEEDS ?=

.PHONY: quickstart study test check clean

quickstart: $(VENV)/.run
	$(BIN)/python train.py configs/quickstart_grpo.toml
	mkdir -p runs/quickstart/dph_js/evaluation
	cp runs/quickstart/grpo/evaluation/base.json runs/quickstart/dph_js/evaluation/  # so that the base answers once
	$(BIN)/python train.py configs/quickstart.toml
	$(BIN)/python -m dph.compare runs/quickstart/grpo runs/quickstart/dph_js

study: $(VENV)/.run
	$(BIN)/python -m study.run $(STUDY) $(if $(METHODS),--methods $(METHODS)) $(if $(SEEDS),--seeds $(SEEDS))

test: $(VENV)/.dev
	$(BIN)/python -m pytest

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.run: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements.txt
	touch $@

$(VENV)/.dev: requirements-dev.txt $(VENV)/.run
	$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements-dev.txt
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

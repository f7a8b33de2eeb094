# make quickstart   three roles on this machine, without Slurm, GPU or model
# make env          .venv with the tools of the checks, openai and reasoning-gym
# make test         every check; REQUIRE=slurm turns a skipped Slurm lane into a failure, LANES="lint unit" picks some
# make test-real    the contract suite with SGLang itself, on a CPU (docs/real-engine.md)
# make lint         formatting, style and types
# make bench        what tests/bench measures, as JSON
# make clean        everything that was generated, the environment too
#
# PYTHON=/path/to/python3.11 names the interpreter that .venv is made from.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help env quickstart test test-real lint format docs bench clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | sed '/^$$/q'

env:
	@tools/env.sh dev

quickstart:
	@tools/quickstart.sh

test:
	@tools/test.sh

lint:
	@LANES=lint tools/test.sh

format:
	@tools/env.sh dev
	@.venv/bin/python -m ruff check --quiet --fix .
	@.venv/bin/python -m ruff format .

docs:
	@tools/env.sh dev
	@.venv/bin/python -m relax_slurm.config.reference
	@.venv/bin/python tools/state_machines.py

bench:
	@tools/bench.sh

clean:
	@tools/clean.sh

test-real:
	@tools/real/test.sh

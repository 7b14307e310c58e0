# One virtual environment, made on first use; everything else runs from it.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.made
LIBRARIES := .venv-libraries
PEERS := .venv-peers
MINUTES ?= 10
SEED ?= 1

.PHONY: demo test test-libraries test-repeat lint types conformance bench simulate multi-node slurm proof chaos \
	recovery-tour compat bench-recovery bench-training bench-controller bench-rendezvous generated clean

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[dev,control,stacks]'
	touch $@

demo: $(STAMP)  ## train on 4 workers, lose one, go on
	$(PY) examples/demo.py

# A machine that does other work at the same time can be too slow for a test with real processes:
# what failed gets a second try, alone, and both are printed. `test-repeat` gives none.
test: $(STAMP)  ## the whole suite; what waits for processes leaves the processors to others
	$(PY) -m pytest -n 3 --dist loadfile || $(PY) -m pytest --last-failed --last-failed-no-failures none

$(LIBRARIES)/.made: pyproject.toml
	$(PYTHON) -m venv $(LIBRARIES)
	$(LIBRARIES)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy
	$(LIBRARIES)/bin/python -m pip install --quiet --disable-pip-version-check lightning transformers \
		accelerate hypothesis pytest pytest-timeout -e '.[stacks]'
	touch $@

test-libraries: $(LIBRARIES)/.made  ## Lightning, Hugging Face and Accelerate, the real ones
	$(LIBRARIES)/bin/python -m pytest -p no:xdist -c pyproject.toml tests/libraries

test-repeat: $(STAMP)  ## the tests with real processes, ten times in a row
	for i in 1 2 3 4 5 6 7 8 9 10; do $(PY) -m pytest -m process || exit 1; done

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(STAMP)
	$(PY) -m mypy

conformance: $(STAMP)  ## the contract's suite against torch's implementation and ours
	$(PY) conformance/run.py

bench: $(STAMP)  ## ours beside torchrun, in one run
	$(PY) bench/bench_agent.py

simulate: $(STAMP)  ## membership under a virtual clock: SEED=, NODES=, EVENTS=, RUNS=
	$(PY) -m tests.rendezvous.simulation --seed $(or $(SEED),1) --nodes $(or $(NODES),1000) \
		--events $(or $(EVENTS),1000000) --runs $(or $(RUNS),0)

multi-node: $(STAMP)  ## three hosts in network namespaces: killed, cut off, stopped, told to go, and back
	$(PY) bench/multi_node.py

slurm: $(STAMP)  ## examples/slurm on a real Slurm of three nodes, one of them killed (as root)
	$(PY) bench/slurm.py

proof: $(STAMP) $(LIBRARIES)/.made  ## faults at every place of a step, against the run without one, bit for bit
	$(PY) bench/proof.py

chaos: $(STAMP)  ## random faults at random moments; MINUTES and SEED; the seed makes them again
	$(PY) bench/chaos.py --minutes $$($(PY) -c 'print(0.6 * $(MINUTES))') --seed $(SEED)
	$(PY) bench/chaos_nodes.py --minutes $$($(PY) -c 'print(0.4 * $(MINUTES))') --seed $(SEED)

recovery-tour: $(STAMP)  ## every strategy of the recovery protocol and every fall-back, as a transcript
	$(PY) examples/recovery_tour.py

compat: $(STAMP)  ## doubles of the original server and clients against ours, and a fuzz
	$(PY) -m compat

$(PEERS)/.made:
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy
	-$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps torchft-nightly
	-$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check opentelemetry-sdk \
		opentelemetry-exporter-otlp nvidia-resiliency-ext
	touch $@

bench-recovery: $(STAMP) $(PEERS)/.made  ## SIGKILL to the first good step, ours and the peers'
	unset PYTHONDONTWRITEBYTECODE PYTHONUNBUFFERED; $(PY) bench/bench_recovery.py

bench-training: $(STAMP)  ## what a session costs, and a recovery in place
	$(PY) bench/bench_training.py

bench-rendezvous: $(STAMP)  ## 8 to 1,024 nodes agree, beside torch's c10d
	$(PY) bench/bench_rendezvous.py

bench-controller: $(STAMP)  ## 10,000 jobs on one controller
	$(PY) bench/bench_controller.py

generated: $(STAMP)  ## the generated code and tables, anew
	$(PY) -m phalanx.proto.generate
	$(PY) -m phalanx.recovery.render docs/recovery-protocol.md

clean:
	rm -rf $(VENV) $(LIBRARIES) $(PEERS) out build *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

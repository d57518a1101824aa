# make demo   trains vilonghorn_nano on the embedded digits, through FFCV, into runs/digits, and measures it
# make test   runs the tests
#
# Either sets up .venv first (PYTHON=python3.12 chooses its interpreter). Again, they do only what is not done yet: a
# finished run is measured anew, a broken one goes on.
PYTHON ?= python3
VENV := .venv/bin/python
DATA := data/digits
RUN := runs/digits
# Threads with nothing to do give up their core: to FFCV's decoders, and to whatever else the machine runs.
export OMP_WAIT_POLICY ?= passive

.PHONY: demo test

demo: .venv/.ready $(DATA)/train.beton $(DATA)/val.beton
	@if [ -e $(RUN)/predictions.png ]; then set -- --evaluate $(RUN) --checkpoint last; \
	elif [ -e $(RUN)/last.pt ]; then set -- --resume $(RUN); \
	else set -- --config configs/digits.yaml --run.dir $(RUN); fi; \
	echo "$(VENV) train_imagenet.py $$*"; $(VENV) train_imagenet.py "$$@"

test: .venv/.ready
	$(VENV) -m pytest

.venv/.ready: setup.sh pyproject.toml $(wildcard kernels/*)
	@PYTHON="$(PYTHON)" sh setup.sh
	@touch $@

$(DATA)/%.beton: | .venv/.ready $(DATA)
	$(VENV) -m vilonghorn.data.beton $(DATA)/$* $@

$(DATA): | .venv/.ready
	@mkdir -p $(@D)
	$(VENV) -m vilonghorn.data.digits digits $@

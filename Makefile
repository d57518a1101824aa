# make demo   trains vilonghornv2_nano on the embedded digits, through FFCV, into runs/digits, and measures it
# make test   runs the linters, then the tests
# make lint   runs the linters: ruff, clang-format, mypy
# make docs   builds the site of the documentation, with the demo in the browser, into site/, and fails at a broken link
# make wheels builds the source archive and the wheels of all platforms into dist/; see docs/install.md
#
# All but wheels set up .venv first (PYTHON=python3.12 chooses its interpreter). A second call does only what is missing:
# it evaluates a finished run again and resumes an interrupted one.
PYTHON ?= python3
VENV := .venv/bin/python
DATA := data/digits
RUN := runs/digits
# Waiting OpenMP threads yield their core to FFCV's decoders.
export OMP_WAIT_POLICY ?= passive

.PHONY: demo test lint docs wheels

demo: .venv/.ready $(DATA)/train.beton $(DATA)/val.beton
	@if [ -e $(RUN)/predictions.png ]; then set -- --evaluate $(RUN) --checkpoint last; \
	elif [ -e $(RUN)/last.pt ]; then set -- --resume $(RUN); \
	else set -- --config digits --data.train $(DATA)/train.beton --data.val $(DATA)/val.beton --run.dir $(RUN); fi; \
	echo "$(VENV) train_imagenet.py $$*"; $(VENV) train_imagenet.py "$$@"

test: lint
	OMP_NUM_THREADS=1 $(VENV) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: .venv/.ready
	$(VENV) -m ruff check
	$(VENV) -m ruff format --check --quiet
	find kernels -name '*.h' -o -name '*.c*' -a -not -name '*.txt' | xargs .venv/bin/clang-format --dry-run --Werror
	$(VENV) -m mypy

docs: build/docs/.ready build/demo
	NO_MKDOCS_2_WARNING=1 build/docs/bin/python -m mkdocs build

# The demo: a page of --to web with the weights of icons.
EXAMPLES := docs/interpret/umbrella.png docs/export/sailboat.png docs/export/house.png
build/demo: .venv/.ready vilonghorn/export/web_page.py $(EXAMPLES) $(wildcard vilonghorn/export/page/* vilonghorn/weights/vilonghornv2*)
	rm -rf $@
	@mkdir -p $(@D)
	$(VENV) -m vilonghorn export vilonghornv2_nano.icons480 --to web --examples $(EXAMPLES) --output $@

wheels:
	@PYTHON="$(PYTHON)" sh wheels/build.sh

.venv/.ready: setup.sh pyproject.toml $(shell find kernels -type f)
	@PYTHON="$(PYTHON)" sh setup.sh
	@touch $@

build/docs/.ready: pyproject.toml
	$(PYTHON) -m venv build/docs
	build/docs/bin/python -m pip install --quiet --upgrade pip
	build/docs/bin/python -m pip install --quiet --group docs
	@touch $@

$(DATA)/%.beton: | .venv/.ready $(DATA)
	$(VENV) -m vilonghorn beton $(DATA)/$* $@

$(DATA): | .venv/.ready
	@mkdir -p $(@D)
	$(VENV) -m vilonghorn data digits $@

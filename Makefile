# The one entry point; each target is a script in scripts/, which says what it does. PG is the Postgres version.
# Everything downloaded or built for the set-up lies in .tools, compiled code in target; both may be deleted.

PG ?= 16
SHARDS ?= 8
REPLICAS ?= 0
LAYOUT ?= databases
DIR ?= .tools/cluster
PROFILE ?= release
MINUTES ?= 60
export PG PG_CONFIG

.PHONY: help demo test cluster cluster-down bench experiments lint differential consistency gauntlet postgres install-extension tools clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 20
	@echo
	@echo 'Variables: PG=15..18 (16), PG_CONFIG=path of a server of your own, SHARDS, REPLICAS, LAYOUT=databases|servers, DIR.'
	@echo 'A fresh machine needs Rust (https://rustup.rs); the rest is installed into .tools, or by apt when run as root.'

demo: ## builds everything and shows the product on eight shards (12 minutes on a fresh machine, then 1)
	@scripts/demo.sh

test: ## all tests and the linters with PG (15 minutes on a fresh machine)
	@scripts/test.sh

cluster: tools ## a coordinator and SHARDS shards in DIR, with DIR/env to source; NOEXT=1 leaves the extension out
	@test -n "$(NOEXT)" || scripts/extension.sh $(PROFILE)
	@scripts/cluster.py up --pg $(PG) --shards $(SHARDS) --replicas $(REPLICAS) --layout $(LAYOUT) \
	    --dir '$(DIR)' $(if $(NOEXT),--no-extension)

cluster-down: ## stops the servers of DIR; the data stays, `make cluster` starts them again
	@scripts/cluster.py down --dir '$(DIR)'

bench: ## one figure a line: name value; BENCH="routing ..." chooses programs, BENCH_ONLY=regexp figures
	@scripts/bench.sh $(BENCH)

experiments: ## one shard against all shards, by three routers: CSV files and charts in RESULTS_DIR
	@scripts/experiments.sh

lint: ## formatting, clippy, where unsafe stands, length of files
	@scripts/lint.sh

differential: ## generated statements on shards against plain tables, for MINUTES
	@MINUTES=$(MINUTES) scripts/differential.sh

consistency: ## clients that must not go back in time while servers lag and die, for MINUTES (say 10)
	@MINUTES=$(MINUTES) scripts/consistency.sh

gauntlet: ## moves under load while everything breaks, with a table at the end; SCENARIOS=regexp, SHARDS=3, MINUTES, SEED
	@MINUTES='$(if $(filter file,$(origin MINUTES)),0,$(MINUTES))' SHARDS='$(if $(filter file,$(origin SHARDS)),3,$(SHARDS))' scripts/gauntlet.sh

postgres: ## a private Postgres of version PG in .tools/pgNN
	@scripts/prerequisites.sh
	@scripts/postgres.sh

install-extension: tools ## builds the extension (PROFILE=release|debug) into that Postgres
	@scripts/extension.sh $(PROFILE)

tools: postgres

clean: ## stops the cluster in DIR, removes target and .tools
	@scripts/clean.sh '$(DIR)'

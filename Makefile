# Go alone is enough to build and, with PostgreSQL's server binaries on the machine, to test. The other tools are pinned in
# tools/go.mod and built into .bin when a target needs them.

GO           ?= go
BIN          := .bin
FUZZTIME     ?= 60s
BENCHTIME    ?= 1s
# Of one package. The whole run takes minutes on two cores; a test that hangs says so.
TIMEOUT      ?= 5m
RACE_TIMEOUT ?= 15m

.DEFAULT_GOAL := help

.PHONY: help
help: ## List the targets
	@awk 'BEGIN { FS = ":.*## " } /^[a-z\/]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: ## Build the command into .bin/syncpg
	$(GO) build -o $(BIN)/syncpg ./cmd/syncpg

.PHONY: dev
dev: ## Run a database and a server for development
	$(GO) run ./cmd/syncpg dev

.PHONY: test
test: ## Run every test
	$(GO) test -timeout $(TIMEOUT) ./...

.PHONY: test/race
test/race: ## Run every test with the race detector
	$(GO) test -race -timeout $(RACE_TIMEOUT) ./...

.PHONY: test/soak
test/soak: ## Let 200 clients connect, push, acknowledge and vanish at random for 30 s, with the race detector
	SYNCPG_REALTIME_RACE_FOR=30s $(GO) test -race -count=1 -timeout $(TIMEOUT) -run 'AtRandom$$' ./realtime ./integration

.PHONY: test/vectors
test/vectors: ## Check the codec against the published vectors of the protocol in SYNCPG_VECTORS
	@[ -d "$$SYNCPG_VECTORS" ] || { echo "SYNCPG_VECTORS has to name the directory of the published vectors"; exit 1; }
	SYNCPG_VECTORS=$$(cd "$$SYNCPG_VECTORS" && pwd) $(GO) test -count=1 -tags vectors -run 'TestPublished' ./ssp2

.PHONY: test/catalog
test/catalog: ## Check search_path, volatility, comments and grants of the SQL objects
	$(GO) test -run 'Catalog|FreshRole' ./migrations

.PHONY: conformance
conformance: ## Run the protocol's own scenarios and write RESULTS.md; what it needs: go doc ./integration/conformance
	$(GO) run ./integration/conformance --runs 3

.PHONY: fuzz
fuzz: ## Run each fuzz target for FUZZTIME (60s)
	@set -e; for package in $$($(GO) list ./...); do \
		targets=$$($(GO) test -list '^Fuzz' $$package); \
		for target in $$(echo "$$targets" | grep '^Fuzz' || true); do \
			echo "$$package $$target"; \
			$(GO) test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) $$package; \
		done; \
	done

.PHONY: bench
bench: ## Run the benchmarks, each for BENCHTIME (1s; 1x is a smoke test)
	$(GO) test -run '^$$' -bench . -benchmem -benchtime $(BENCHTIME) ./...

.PHONY: generate generate/schema generate/sqlc
generate: ## Regenerate sql/schema.sql and db
	$(MAKE) generate/schema
	$(MAKE) generate/sqlc

generate/schema: ## Migrate a scratch database and dump it to sql/schema.sql
	$(GO) run ./internal/schemadump sql/schema.sql

generate/sqlc: $(BIN)/sqlc ## Regenerate db from sql/schema.sql and sql/queries
	$(BIN)/sqlc generate

.PHONY: verify verify/schema verify/sqlc verify/tidy
verify: verify/schema verify/sqlc verify/tidy ## Fail when anything generated is stale

verify/schema: ## Fail when sql/schema.sql is not what the migrations make
	$(GO) run ./internal/schemadump -check sql/schema.sql

verify/sqlc: $(BIN)/sqlc ## Fail when db is not what sqlc makes
	$(BIN)/sqlc diff

verify/tidy: ## Fail when a go.mod is not tidy
	$(GO) mod tidy -diff
	cd tools && $(GO) mod tidy -diff

.PHONY: lint
lint: $(BIN)/golangci-lint ## Run go vet and the linters
	$(GO) vet ./...
	cd tools && $(GO) vet ./pgdocker
	$(BIN)/golangci-lint run ./...

.PHONY: fmt
fmt: $(BIN)/golangci-lint ## Format the Go files
	$(BIN)/golangci-lint fmt ./...

.PHONY: ci
ci: test lint verify test/race ## Run what decides about a change

# A tool is built once, and again when its version changes.
TOOLS := sqlc golangci-lint gofumpt tern
PATH_sqlc          := github.com/sqlc-dev/sqlc/cmd/sqlc
PATH_golangci-lint := github.com/golangci/golangci-lint/v2/cmd/golangci-lint
PATH_gofumpt       := mvdan.cc/gofumpt
PATH_tern          := github.com/jackc/tern/v2

.PHONY: tools
tools: $(TOOLS:%=$(BIN)/%) ## Build the pinned tools into .bin

$(TOOLS:%=$(BIN)/%): $(BIN)/%: tools/go.mod tools/go.sum
	cd tools && $(GO) build -o ../$@ $(PATH_$*)
	@touch $@

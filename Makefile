# The four things one does with this repository. `make test` needs a Rust toolchain and a C compiler, and python3 and
# node for the tests with web frameworks, proxies and clients. Without those two it skips these tests; with CI=true they
# fail. It installs Redis, the frameworks, the peers and a browser.

.PHONY: run test install-redis install-frameworks install-peers install-browser test-library test-workspace test-restarts test-floods test-valkey test-frameworks \
	test-peers test-loom test-examples \
	test-fuzz install-llhttp lint lint-workspace lint-wasm install-wasm-target lint-examples lint-fuzz fuzz install-cargo-fuzz bench \
	docs chart pictures screenshots deny install-cargo-deny package proto

run:
	cargo run --release -- serve

test: install-redis install-frameworks install-peers install-browser test-library test-workspace test-valkey test-loom test-examples test-fuzz

# The servers that the tests of the Redis store start.
install-redis:
	tools/install-redis

# The upstreams of the tests in `tollgate-server/tests/frameworks`. Those tests skip what is missing, except with CI=true.
install-frameworks:
	tools/install-frameworks

# The parser of Node, with which the fuzz targets compare ours.
install-llhttp:
	tools/install-llhttp

# Every spelling of a corpus against every framework behind the gateway, with a table of those that get past a limit.
# `make test-workspace` runs it too. FRAMEWORKS=koa,nginx names some of them.
test-frameworks: install-frameworks
	cargo test -p tollgate-server --test frameworks -- --nocapture

# The proxies and clients of the tests in `tollgate-server/tests/peers`. Those tests skip what is missing, except with
# CI=true. Even then they skip HAProxy, Java, curl, redis-cli and Prometheus on a machine without apt-get, which installs
# them.
install-peers:
	tools/install-peers

# The configurations and programs of docs/integrations, with the real proxies and clients. `make test-workspace` runs them
# too.
test-peers: install-redis install-peers
	cargo test -p tollgate-server --test peers

# The browser of the tests in `tollgate-server/tests/dashboard`. Those tests skip what is missing, except with CI=true, and
# even then on a machine without Chromium and without apt-get.
install-browser:
	tools/install-browser

# Every feature that a user can choose is checked by itself, so that none leans on another by accident; the tests run with
# none of them and with all.
FEATURES := tokio uuid redis

test-library:
	cargo test -p tollgate --no-default-features
	# Without the tests, whose dependencies would enable features that the library lacks.
	for feature in $(FEATURES); do cargo check -p tollgate --no-default-features --features=$$feature || exit 1; done
	for feature in "" file redis; do cargo check -p tollgate-rules --features=$$feature || exit 1; done
	# One at a time, because crates that are checked together share their features.
	for crate in http config tower http1 telemetry net tools; do cargo check -p tollgate-$$crate || exit 1; done
	cargo check -p tollgate-tower --features=axum
	# The server without traces; the other tests have them.
	cargo check -p tollgate-server --all-targets

# The library with all its features, and all the rest but for the benchmarks: what they compare with takes minutes to build.
# Most of these tests wait, for deadlines and for other processes, so more of them run at a time than there are processors.
test-workspace:
	RUST_TEST_THREADS=4 cargo test --workspace --exclude bench --all-features

# Twenty restarts under load, in place of the three of `make test-workspace`.
test-restarts:
	RESTARTS=20 cargo test --workspace --exclude bench --all-features --test operation -- --nocapture restarts_under_load

# Floods of invented keys at more sizes of the memory, in KiB, and with more windows, and a table of what they do.
FLOODS ?= 96,1024,4096

test-floods:
	FLOODS=$(FLOODS) cargo test -p tollgate-config --all-features --test floods -- --nocapture

# The tests of the Redis store once more, on Valkey: single, Sentinel and Cluster. Skipped where none is installed, except
# with CI=true. TLS alone is tested on Redis, because the packaged Valkey is built without it.
VALKEY_SERVER ?= $(CURDIR)/target/tools/valkey/valkey-server

test-valkey: install-redis
	if [ -x "$(VALKEY_SERVER)" ]; then \
		REDIS_SERVER="$(VALKEY_SERVER)" RUST_TEST_THREADS=4 \
			cargo test --workspace --exclude bench --all-features --test redis; \
	elif [ "$$CI" = true ]; then \
		echo "no Valkey at $(VALKEY_SERVER): run tools/install-redis, or set VALKEY_SERVER" >&2; exit 1; \
	else \
		echo "skipped: no Valkey at $(VALKEY_SERVER): run tools/install-redis, or set VALKEY_SERVER" >&2; \
	fi

# Every interleaving of the threads on the table of the memory store. A build of its own, in a directory of its
# own, because the flag reaches every crate.
test-loom:
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test -p tollgate --lib loom

# Workspaces of their own, but what they share with this one is built once.
test-examples:
	cargo test --manifest-path examples/Cargo.toml --target-dir target

# What the fuzzer starts from and what it has found, replayed without it.
test-fuzz: install-llhttp
	cargo test --manifest-path fuzz/Cargo.toml --target-dir target

lint: lint-workspace lint-wasm lint-examples lint-fuzz

lint-workspace:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --all-features -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --exclude bench --no-deps --all-features

# The library without features builds where there is no operating system.
lint-wasm: install-wasm-target
	cargo clippy -p tollgate --no-default-features --target $(WASM_TARGET) -- -D warnings

WASM_TARGET := wasm32-unknown-unknown

install-wasm-target:
	rustup target list --installed | grep -qx $(WASM_TARGET) || rustup target add $(WASM_TARGET)

lint-examples:
	cargo fmt --manifest-path examples/Cargo.toml --check
	cargo clippy --manifest-path examples/Cargo.toml --target-dir target --all-targets -- -D warnings

# Without the feature `libfuzzer`, which needs a C++ compiler.
lint-fuzz:
	cargo fmt --manifest-path fuzz/Cargo.toml --check
	cargo clippy --manifest-path fuzz/Cargo.toml --target-dir target --all-targets -- -D warnings

# Licenses, advisories, sources and duplicates of all dependencies, by deny.toml. It needs the network.
deny: install-cargo-deny
	cargo deny --all-features check

install-cargo-deny:
	cargo deny --version >/dev/null 2>&1 || cargo install --locked cargo-deny

# A static binary in an archive and a Debian package, in target/packages, both tested.
package:
	tools/package

# The Rust code of the protocols in tollgate-server/proto. The result is checked in.
proto:
	cargo run --manifest-path tools/proto/Cargo.toml --target-dir target/proto

FUZZ_TARGETS := rule_file normal_forms paths forwarded cookies jwt expressions envoy_rule_file resp redis_replies http_body descriptors access_log \
	request_head request_body response_head response_body connection
FUZZ_SECONDS ?= 60
# A thousand times what any input should take, on a machine that is busy.
FUZZ_TIMEOUT_SECONDS := 10

# Each target in turn. A stable toolchain does, and a C++ compiler; `fuzz/src/lib.rs` says what to do with what it finds.
fuzz: $(FUZZ_TARGETS:%=fuzz-%)

.PHONY: $(FUZZ_TARGETS:%=fuzz-%)
$(FUZZ_TARGETS:%=fuzz-%): fuzz-%: install-cargo-fuzz install-llhttp
	mkdir -p fuzz/corpus/$*
	cargo fuzz run --sanitizer none --features libfuzzer $* fuzz/corpus/$* fuzz/seeds/$* -- \
		-dict=fuzz/words.dict -max_total_time=$(FUZZ_SECONDS) -timeout=$(FUZZ_TIMEOUT_SECONDS)

install-cargo-fuzz:
	cargo fuzz --version >/dev/null 2>&1 || cargo install --locked cargo-fuzz

bench:
	cargo run --profile dist -p bench -- memory

# Draws docs/speed.svg from the saved results of benchmarks.
chart:
	cargo run -p bench -- chart bench/results/memory.txt bench/results/gateway.txt --svg docs/speed.svg

# Draws the pictures of docs/algorithms.md with `tollgate simulate`. A test fails if they are not current.
pictures:
	cargo build -p tollgate-server
	tools/draw-pictures target/debug/tollgate docs/pictures

# Takes the pictures of docs/dashboard.md in Chromium: a server with a minute of traffic.
screenshots: install-browser
	TAKE_SCREENSHOTS=1 cargo test -p tollgate-server --test dashboard screenshots

# The documentation as a site with search, in target/book. Installs mdBook into target/tools where it is missing.
docs:
	tools/build-docs

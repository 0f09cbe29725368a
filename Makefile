# The four things one does with this repository. `make test` needs a Rust toolchain and a C compiler, and installs
# what else it needs: Redis.

.PHONY: run test install-redis test-library test-workspace test-loom test-examples lint lint-workspace lint-examples bench

run:
	cargo run --release -- serve

test: install-redis test-library test-workspace test-loom test-examples

# The servers that the tests of the Redis store start.
install-redis:
	tools/install-redis

# Every set of the library's features that a user can choose is built, and each test runs with the smallest set that has
# it, so that no feature leans on another by accident.
test-library:
	cargo test -p tollgate --no-default-features
	cargo test -p tollgate --features=tokio --lib --test waiting
	cargo test -p tollgate --features=http --lib --test http_answers
	cargo test -p tollgate --features=rules --lib --test gate
	cargo test -p tollgate --features=file --lib --test rule_file
	cargo test -p tollgate --features=tower --lib
	cargo test -p tollgate --features=redis --test redis
	cargo test -p tollgate --all-features --lib --test gate --test gate_on_redis --test tower
	cargo test -p tollgate --all-features --doc

# All the rest, but for the benchmarks: what they compare with takes minutes to build.
test-workspace:
	cargo test --workspace --exclude tollgate --exclude bench

# Every interleaving of the threads on the table of the memory store. A build of its own, in a directory of its
# own, because the flag reaches every crate.
test-loom:
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test -p tollgate --release --lib loom

test-examples:
	cargo test --manifest-path examples/Cargo.toml

lint: lint-workspace lint-examples

lint-workspace:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --all-features -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --exclude bench --no-deps --all-features

lint-examples:
	cargo fmt --manifest-path examples/Cargo.toml --check
	cargo clippy --manifest-path examples/Cargo.toml --all-targets -- -D warnings

bench:
	cargo run --release -p bench -- memory

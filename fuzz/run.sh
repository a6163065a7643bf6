#!/bin/sh
# Runs every fuzz target for 60 seconds, or as many as the argument says, beginning with its seeds.
# Needs a nightly compiler and `cargo install cargo-fuzz`. What it finds lands in fuzz/artifacts/TARGET; make it
# smaller with `cargo +nightly fuzz tmin` and put it into fuzz/seeds/TARGET, where the tests replay it.
set -eu
cd "$(dirname "$0")/.."
for target in $(cargo +nightly fuzz list); do
    mkdir -p "fuzz/corpus/$target"
    cargo +nightly fuzz run "$target" "fuzz/corpus/$target" "fuzz/seeds/$target" -- \
        -max_total_time="${1:-60}" -max_len=20000 -rss_limit_mb=2048
done

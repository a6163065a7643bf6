#!/usr/bin/env bash
# Builds the three programs with nvcc, checks every kernel against float64, times them and prints the tables last. Needs one sm_90a GPU, about 25 GB of
# its memory, and 5 minutes with the build. Usage: ./run.sh [quick]   (quick: 1 and 16 rows only). NVCC and BUILD may be set.
set -euo pipefail
cd "$(dirname "$0")"
build=${BUILD:-build}
mkdir -p "$build"
for p in skinny_gemm attn_decode chain; do
  "${NVCC:-nvcc}" -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -split-compile=0 -o "$build/$p" $p.cu &
done
wait
fail=0
for p in "chain" "attn_decode" "skinny_gemm ${1:-}"; do
  timeout 180 "$build"/$p > "$build/${p%% *}.log" 2>&1 || { fail=1; grep -hE 'WRONG|FAILED' "$build/${p%% *}.log" | head -20; }
done
grep -hE 'empty|barrier|planes' "$build/chain.log" | cut -c1-230
grep -E 'batch  1 ' "$build/attn_decode.log" | cut -c1-110
sed -n '/^share of read ceiling/,$p' "$build/skinny_gemm.log"
exit $fail

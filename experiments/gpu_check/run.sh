#!/usr/bin/env bash
# Checks and measures every kernel on one GPU, under 12 minutes, one JSON document out.
#
#   experiments/gpu_check/run.sh OUT            on a machine with a GPU and torch, triton, numpy, safetensors, ...
#   experiments/gpu_check/run.sh OUT --tiny     a rehearsal anywhere, on Triton's interpreter
#
# Installs nothing but this project's own wheel (dist/laneformer-*.whl, from `make wheel`), without an index, into a
# folder of its own. PYTHON names the interpreter. A step that fails or takes too long does not keep the others from running.
set -u
cd "$(dirname "$0")/../.."
out=${1:?usage: run.sh OUT [--tiny]}
tiny=${2:-}
python=${PYTHON:-python3}
here=experiments/gpu_check
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
parts=$work/parts
mkdir -p "$parts"
: > "$parts/steps.txt"
commit=$(git rev-parse --short=12 HEAD 2>/dev/null || cat dist/commit.txt 2>/dev/null || echo unknown)

wheel=$(ls -t dist/laneformer-*.whl 2>/dev/null | head -n 1)
if [ -z "$wheel" ]; then
    echo "no dist/laneformer-*.whl: run 'make wheel' first" >&2
    exit 2
fi
"$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$work/site" "$wheel" || exit 2
export PYTHONPATH=$work/site PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRITON_CACHE_DIR=$work/triton OMP_WAIT_POLICY=passive

step() { # name, seconds, command...
    local name=$1 limit=$2
    shift 2
    echo "== $name ($(date +%T))"
    timeout -k 5 "$limit" "$@"
    local code=$?
    echo "$name $code" >> "$parts/steps.txt"
    [ $code = 0 ] || echo "$name ended with exit code $code"
    # After every step, so that what ran last before a limit is not lost.
    "$python" $here/collect.py "$parts" "$out/results.json" --commit "$commit" ${tiny:+--rehearsal} > "$out/table.txt"
}

if [ -n "$tiny" ]; then
    export TRITON_INTERPRET=1
else
    # Compiling takes longer than measuring, but all of it can be done at once.
    began=$(date +%s)
    for name in one_of_eight one_gpu correctness; do
        timeout -k 5 200 "$python" $here/$name.py --compile-only > "$out/compile_$name.txt" 2>&1 &
    done
    wait
    echo "compiled in $(($(date +%s) - began)) s"
fi
step sync_latency 60 "$python" $here/sync_latency.py $tiny --json "$parts/sync_latency.json"
if [ -n "$tiny" ]; then
    tiles="--tiny --rounds 2"
    step tiles_8 120 "$python" -m laneformer.kernels.tile_bench $tiles --ranks 4 --json "$parts/tiles_8.json"
else
    tiles="--preset 2b --dtype float16"
    step tiles_1 90 "$python" -m laneformer.kernels.tile_bench $tiles --ranks 1 --json "$parts/tiles_1.json"
    step tiles_8 60 "$python" -m laneformer.kernels.tile_bench $tiles --ranks 8 --json "$parts/tiles_8.json"
fi
step one_of_eight 90 "$python" $here/one_of_eight.py $tiny --json "$parts/one_of_eight.json"
step one_gpu 170 "$python" $here/one_gpu.py $tiny --json "$parts/one_gpu.json"
step groups 100 "$python" $here/groups.py $tiny --json "$parts/groups.json"
step correctness 150 "$python" $here/correctness.py $tiny --json "$parts/correctness.json"
cat "$out/table.txt"
! grep -qv ' 0$' "$parts/steps.txt"

#!/bin/sh
# The C core without Python: headers, GCC, Clang, sanitizers of memory and of threads, emulated aarch64 and AVX-512,
# WebAssembly, disassembly. A missing tool skips its check; with CI set it is an error. `make -C csrc test` has more
# cases.
# Usage: tools/check_core.sh [BUILD_DIRECTORY]
set -eu
cd "$(dirname "$0")/../csrc"
if [ $# -gt 0 ]; then
    build=$1
else
    build=$(mktemp -d)
    trap 'rm -rf "$build"' EXIT
fi
# The vectors are written by a Python with NumPy.
python=${PYTHON:-python3}
if ! "$python" -c 'import numpy' 2>/dev/null; then
    "$python" -m venv "$build/python"
    python=$(cd "$build" && pwd)/python/bin/python
    "$python" -m pip install -q numpy
fi
jobs=$(nproc 2>/dev/null || echo 2)

# has NAME COMMAND…: whether all commands are installed.
has() {
    name=$1
    shift
    for command in "$@"; do
        if ! command -v "$command" >/dev/null; then
            echo "$name: left out, $command is not installed"
            [ -z "${CI:-}" ] || exit 1
            return 1
        fi
    done
}
run() {
    echo "== $* ($(date +%T))"
    make --silent --jobs "$jobs" --output-sync=target BUILD="$build" PYTHON="$python" "$@"
}

# What takes longest comes first.
targets= builds="build-gcc $build/vectors/written"
if has aarch64 aarch64-linux-gnu-gcc qemu-aarch64; then
    targets="$targets aarch64" builds="$builds build-aarch64 build-aarch64-undefined"
fi
if [ "$(uname -m)" != x86_64 ]; then
    echo "emulate: left out, this is no x86-64"
elif [ -r /proc/cpuinfo ] && ! grep -qw avx2 /proc/cpuinfo; then
    echo "emulate: left out, this CPU has no AVX2"
else
    targets="$targets emulate" builds="$builds build-emulate"
fi
targets="$targets sanitize quick" builds="$builds build-sanitize"
if has clang clang-14; then
    targets="$targets clang tsan" builds="$builds build-clang build-tsan"
fi
if [ "$(uname -m)" = x86_64 ] && has wasm clang-14 wasm-ld-14 node; then
    targets="$targets wasm" builds="$builds build-wasm"
fi
if has disassemble clang-14 objdump; then
    targets="$targets disassemble"
fi

if has headers python3; then
    python3 ../tools/check_headers "${CC:-cc}"
fi

# Build first: a compiler that runs at the same time would slow down the tests of threads.
# shellcheck disable=SC2086 # names of targets
run $builds
# shellcheck disable=SC2086 # side by side: most of their time one thread works
run $targets
echo "the core: all checks passed"

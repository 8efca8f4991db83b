#!/bin/sh
# Everything that the C core promises by itself, without Python: GCC, Clang, sanitizers, aarch64 and AVX-512 under
# emulation, and a look at the disassembly. What is not installed is named and left out, unless CI is set: then it is an
# error. All of it with fewer cases: `make -C csrc test` has the rest.
# Usage: tools/check_core.sh [DIRECTORY], where to build; a temporary one by default.
set -eu
cd "$(dirname "$0")/../csrc"
if [ $# -gt 0 ]; then
    build=$1
else
    build=$(mktemp -d)
    trap 'rm -rf "$build"' EXIT
fi
jobs=$(nproc 2>/dev/null || echo 2)

# has NAME COMMAND…: whether all commands are installed; the first that is not is named.
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
    make --silent --jobs "$jobs" BUILD="$build" "$@"
}

targets=quick builds=build-gcc
if has clang clang-14; then
    targets="$targets clang" builds="$builds build-clang build-clang-serial"
fi
targets="$targets sanitize" builds="$builds build-sanitize"
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
if has disassemble clang-14 objdump; then
    targets="$targets disassemble"
fi

# Built side by side, tested one after the other: threads that wait for each other must not wait for a compiler.
# shellcheck disable=SC2086 # names of targets
run $builds
for target in $targets; do
    run "$target"
done
echo "the core: all checks passed"

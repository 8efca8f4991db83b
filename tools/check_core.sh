#!/bin/sh
# Everything that the C core promises by itself, without Python: GCC, Clang, sanitizers, aarch64 under emulation, and a look at
# the disassembly. What is not installed is named and left out, unless CI is set: then it is an error.
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

target() { # target NAME COMMAND…: runs the target when all commands exist
    name=$1
    shift
    for command in "$@"; do
        if ! command -v "$command" >/dev/null; then
            echo "$name: left out, $command is not installed"
            [ -z "${CI:-}" ] || exit 1
            return 0
        fi
    done
    echo "== $name"
    make --silent --jobs "$jobs" BUILD="$build" "$name"
}

target test gcc
target clang clang-14
target sanitize gcc
target aarch64 aarch64-linux-gnu-gcc qemu-aarch64
target disassemble gcc clang-14 objdump
echo "the core: all checks passed"

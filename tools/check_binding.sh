#!/bin/sh
# The binding, which checks whatever Python hands to the core, under AddressSanitizer and UndefinedBehaviorSanitizer:
# the extension is built with them in a copy of the sources, and the tests of hostile lengths, offsets, patterns,
# strides and caches run on it.
# Usage: tools/check_binding.sh PYTHON DIRECTORY; PYTHON has what pyproject.toml builds with and the packages of the
# extra test.
set -eu
python=$(cd "$(dirname "$(command -v "$1")")" && pwd)/$(basename "$1") # as it is: of an environment it is a link
mkdir -p "$2"
directory=$(cd "$2" && pwd)
cd "$(dirname "$0")/.."
rm -rf "$directory/sources"
mkdir "$directory/sources"
git ls-files -z | tar -c --null -T - | tar -x -C "$directory/sources"
cd "$directory/sources"
SELFATTN_SANITIZE=address,undefined "$python" setup.py --quiet build_ext --inplace
runtimes="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"
# Python does not free all it has; what is allocated is looked at, not what is left.
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export PYTHONPATH="$directory/sources" HYPOTHESIS_STORAGE_DIRECTORY="$directory/hypothesis"
LD_PRELOAD="$runtimes" "$python" -m pytest -q -p no:cacheprovider --capture=sys tests/attention \
    -m "not slow and not exhaustive" \
    -k "bad or refuse or hostile or overlap or lengths or cache or strid or layout or fuzz or random or place"

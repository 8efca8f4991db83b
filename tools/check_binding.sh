#!/bin/sh
# The binding under AddressSanitizer and UndefinedBehaviorSanitizer: builds a copy of the sources, and runs the tests of
# hostile input.
# Usage: tools/check_binding.sh PYTHON DIRECTORY; PYTHON has the build requirements and the extra test.
set -eu
python=$(cd "$(dirname "$(command -v "$1")")" && pwd)/$(basename "$1") # a link in an environment: not resolved
mkdir -p "$2"
directory=$(cd "$2" && pwd)
cd "$(dirname "$0")/.."
rm -rf "$directory/sources"
mkdir "$directory/sources"
git ls-files -z | tar -c --null -T - | tar -x -C "$directory/sources"
cd "$directory/sources"
SELFATTN_SANITIZE=address,undefined "$python" setup.py --quiet build_ext --inplace
runtimes="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"
# Python does not free all its memory at exit.
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export PYTHONPATH="$directory/sources" HYPOTHESIS_STORAGE_DIRECTORY="$directory/hypothesis"
LD_PRELOAD="$runtimes" "$python" -m pytest -q -p no:cacheprovider --capture=sys tests/attention \
    tests/nn/test_transformer_core.py tests/interop/test_arrays.py \
    -k "bad or refuse or hostile or overlap or lengths or cache or strid or layout or fuzz or random or place or results or capsules"

#!/bin/sh
# The binding under AddressSanitizer and UndefinedBehaviorSanitizer: runs the tests of hostile input in a copy of the sources.
# Usage: tools/check_binding.sh PYTHON DIRECTORY [BUILD]; PYTHON has NumPy and the extra test. BUILD: that of tools/check_core.sh, whose
# objects are the same; without it all is built in DIRECTORY.
#
# What a sanitizer sees are reads and writes out of bounds, so the tests are those of refusals, of memory that is shared, strided or
# short, and a fifth of the drawn calls: numbers are compared without a sanitizer.
set -eu
python=$(cd "$(dirname "$(command -v "$1")")" && pwd)/$(basename "$1") # a link in an environment: not resolved
mkdir -p "$2"
directory=$(cd "$2" && pwd)
build=${3:-$directory/core}
cd "$(dirname "$0")/.."
make --silent --jobs "$(nproc)" -C csrc build-sanitize GOAL=extension BUILD="$build" PYTHON="$python"
rm -rf "$directory/sources"
mkdir "$directory/sources"
git ls-files -z | tar -c --null -T - | tar -x -C "$directory/sources"
(cd csrc && cp "$build/sanitize/_core.abi3.so" "$directory/sources/selfattn")
cd "$directory/sources"
runtimes="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"
# Python does not free all its memory at exit.
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export PYTHONPATH="$directory/sources" HYPOTHESIS_STORAGE_DIRECTORY="$directory/hypothesis" HYPOTHESIS_PROFILE=few
LD_PRELOAD="$runtimes" "$python" -m pytest -q -p no:cacheprovider --capture=sys tests/attention \
    tests/nn/test_transformer_core.py tests/interop/test_arrays.py \
    -k "(bad or refuse or hostile or overlap or lengths or cache or strid or layout or fuzz or results_that or capsules) and \
not (onnx or follow_one_another or appending_copies_little or memory_grows or test_agrees)"

#!/bin/sh
# disassemble.sh COMPILER FLAGS DIRECTORY OBJECTS: looks in the objects of the x86 ISA files for MMX and for
# instructions beyond their instruction set. It looks in OBJECTS, and in files compiled with -march=native before
# FLAGS, where setuptools puts a user's CFLAGS. Run in csrc/.
set -eu
compiler=$1 flags=$2 directory=$3 objects=$4
mkdir -p "$directory"
failed=0

# look FILE SUFFIX PATTERN WHAT LEAST: fails if a line matches, or if there are fewer instructions.
look() {
    object=$directory/$1$2.o
    listing=$directory/$1$2.s
    objdump -d --no-show-raw-insn "$object" >"$listing"
    lines=$(grep -c '^ ' "$listing")
    if [ "$lines" -lt "$5" ]; then
        echo "FAILED $1$2: only $lines instructions, is anything in it?"
        failed=1
    elif grep -E "$3" "$listing" >"$listing.found"; then
        echo "FAILED $1$2: $(wc -l <"$listing.found") instructions are $4, such as"
        head -3 "$listing.found"
        failed=1
    else
        echo "$compiler $1$2: $lines instructions, none is $4"
    fi
}

# MMX registers are x87's registers, so using them breaks x87's arithmetic.
mmx='%mm[0-7]'

compiling=
for isa in avx2 avxvnni baseline generic; do
    cp "$objects/$isa.o" "$directory/$isa.o"
    # shellcheck disable=SC2086 # flags are words
    $compiler -march=native $flags -c isa/$isa.c -o "$directory/$isa-march=native.o" &
    compiling="$compiling $!"
done
for process in $compiling; do
    wait "$process"
done

for march in "" -march=native; do
    # AVX-512: wide registers, mask registers, and the sixteen new names of the narrow ones
    look avx2 "$march" "$mmx"'|%zmm|%k[0-7]|%[xy]mm(1[6-9]|2[0-9]|3[01])' 'AVX-512 or MMX' 1000
    # the same; and AVX-512's own encoding of the one instruction that both have, without {vex} before it
    look avxvnni "$march" "$mmx"'|%zmm|%k[0-7]|%[xy]mm(1[6-9]|2[0-9]|3[01])|^ *[0-9a-f]+:[[:space:]]+vpdpbusd' \
        'AVX-512 or MMX' 500
    # VEX-encoded: the mnemonic begins with v
    look baseline "$march" "$mmx"'|%ymm|%zmm|%k[0-7]|^ *[0-9a-f]+:[[:space:]]+v[a-z]' 'MMX or beyond SSE2' 1000
    look generic "$march" "$mmx"'|%ymm|%zmm|%k[0-7]|^ *[0-9a-f]+:[[:space:]]+v[a-z]' 'MMX or beyond SSE2' 1000
done
exit $failed

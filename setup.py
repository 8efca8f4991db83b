"""Which C files are compiled, and with which flags; what is said when they cannot be. Metadata and tools are in
pyproject.toml."""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

windows = sys.platform == "win32"
if windows:
    raise SystemExit(
        "selfattn needs GCC 12 or later, or Clang; MSVC is not supported (see docs/guide/semantics.md)."
    )

# No contraction: the compiler must not decide which multiply-adds are fused.
# No -ffast-math: NaN and inf keep their meaning.
compile_args = [
    "-std=c11",
    "-O3",
    "-g0",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
]
# The target platform, which may differ from this one.
if sysconfig.get_platform().endswith("x86_64"):
    # These follow CFLAGS, whose -march must not leak into the ISA files. No MMX: GCC 12 uses it for small moves,
    # and then the thread's x87 arithmetic (NumPy's longdouble) gives NaN.
    compile_args += ["-march=x86-64", "-mno-mmx"]
compile_args.append("-pthread")
link_args = ["-pthread"]
if sys.platform != "darwin":
    # OpenMP's functions are bound together at import: else some could come from one library, others from a later imported
    # PyTorch.
    link_args += ["-Wl,-z,now", "-ldl"]
if os.environ.get("SELFATTN_WERROR"):
    compile_args.append("-Werror")
if sanitizers := os.environ.get("SELFATTN_SANITIZE"):
    # Fewer inlined kernels, or one file compiles for ten minutes (csrc/simd/macros.h).
    compile_args += [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    compile_args += ["-g1", "-O1", "-DSA_PARTS_APART"]
    link_args.append(f"-fsanitize={sanitizers}")

# Compiler and linker flags for OpenMP. ThreadSanitizer does not understand its library.
OPENMP = [(["-fopenmp"], ["-fopenmp"])]
if sys.platform == "darwin":  # Apple's compiler knows the pragmas, and Homebrew has the library
    OPENMP += [
        (["-Xpreprocessor", "-fopenmp", f"-I{prefix}/include"], [f"-L{prefix}/lib", "-lomp"])
        for prefix in ("/opt/homebrew/opt/libomp", "/usr/local/opt/libomp")
    ]
if os.environ.get("SELFATTN_OPENMP") == "0" or "thread" in (sanitizers or ""):
    OPENMP = []

# For wheels: OpenMP's library is copied next to the extension, under the same name as PyTorch's.
bundled = "libgomp.so.1" if os.environ.get("SELFATTN_BUNDLE_OPENMP") == "1" else None
if bundled:
    link_args.append("-Wl,-rpath,$ORIGIN")

# One extension for every CPython from 3.11 on, except free-threaded ones, which have no stable ABI.
stable_abi = not sysconfig.get_config_var("Py_GIL_DISABLED")

headers = glob("csrc/**/*.h", recursive=True)
# The files that take longest to compile come first.
folders = ("isa", "kernels/*", "drivers", "runtime", "python")
sources = [path for folder in folders for path in sorted(glob(f"csrc/{folder}/*.c"))]

# What a build needs, in this order: a file that compiles only if it is there, and what to do if it is not.
NEEDS = [
    (
        "#include <stdlib.h>\n",
        "the compiler '{compiler}' finds no headers of the C library: install them (Debian: libc6-dev)",
    ),
    (
        "#if !defined(__has_builtin)\n#error\n#elif !__has_builtin(__builtin_shufflevector)\n#error\n#endif\n"
        "#if defined(__clang__) && !defined(__apple_build_version__) && __clang_major__ < 14\n#error\n#endif\n",
        "the compiler '{compiler}' is too old ({version}): GCC 12 or Clang 14, or later, is needed; CC=… names another",
    ),
    (
        "#include <Python.h>\n",
        "there are no headers of Python {python}: install them (Debian: python3-dev; Fedora: python3-devel)",
    ),
]


class BuildExt(build_ext):
    """Compiles files at the same time, and copies the built extension next to the sources: Python started in a checkout
    imports the package from there."""

    def build_extensions(self) -> None:
        self.say_what_is_missing()
        self.use_openmp()
        compile_files = self.compiler.compile

        def compile_side_by_side(files: list[str], **options: object) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = pool.map(lambda file: compile_files([file], **options), files)
                return [path for paths in objects for path in paths]

        self.compiler.compile = compile_side_by_side
        super().build_extensions()

    def say_what_is_missing(self) -> None:
        """End with one line, in place of the compiler's many, if something that a build needs is not there."""
        command = list(self.compiler.compiler_so)
        known = {"compiler": shlex.join(command[:1]), "python": sysconfig.get_python_version(), "version": ""}
        try:
            done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
        except OSError:
            raise SystemExit(
                f"selfattn cannot be built: there is no C compiler '{known['compiler']}'. Install GCC 12 or Clang 14, or "
                "later (Debian: gcc), or name yours: CC=…"
            ) from None
        known["version"] = done.stdout.partition("\n")[0]
        include = [f"-I{path}" for path in [*self.compiler.include_dirs, *self.include_dirs]]
        with tempfile.TemporaryDirectory() as directory:
            source = Path(directory, "needs.c")
            for text, message in NEEDS:
                source.write_text(text + "int main(void) { return 0; }\n", encoding="ascii")
                check = [*command, *compile_args, *include, str(source), "-fsyntax-only"]
                if subprocess.run(check, capture_output=True, check=False).returncode != 0:
                    raise SystemExit(f"selfattn cannot be built: {message.format(**known)}.")

    def use_openmp(self) -> None:
        """Build with OpenMP if a test program compiles and links with it; otherwise print one line."""
        with tempfile.TemporaryDirectory() as directory:
            source, program = Path(directory, "openmp.c"), Path(directory, "openmp")
            source.write_text(
                "#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n", encoding="ascii"
            )
            for compiling, linking in OPENMP:
                build = [*self.compiler.compiler_so, *compiling, str(source), "-o", str(program), *linking]
                if subprocess.run(build, capture_output=True, check=False).returncode == 0:
                    for extension in self.extensions:
                        extension.extra_compile_args += compiling
                        extension.extra_link_args += linking
                    return
        print("selfattn is built without OpenMP: POSIX threads run its loops", file=sys.stderr)

    def run(self) -> None:
        super().run()
        if bundled:
            find = [*self.compiler.compiler_so, f"-print-file-name={bundled}"]
            library = subprocess.check_output(find, text=True).strip()
            shutil.copyfile(library, Path(self.build_lib, "selfattn", bundled))
        if not self.inplace:
            self.copy_extensions_to_source()
        if stable_abi:
            # An older build for this Python version alone would be imported first.
            Path("selfattn/_core" + sysconfig.get_config_var("EXT_SUFFIX")).unlink(missing_ok=True)


setup(
    cmdclass={"build_ext": BuildExt},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if stable_abi else {},
    ext_modules=[
        Extension(
            "selfattn._core",
            sources=sources,
            depends=headers,
            include_dirs=["csrc", numpy.get_include()],
            extra_compile_args=compile_args,
            extra_link_args=link_args,
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if stable_abi else [],
            py_limited_api=stable_abi,
        )
    ],
)

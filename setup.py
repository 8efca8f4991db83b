"""Which C file is compiled, and with which flags. Metadata and tools are in pyproject.toml."""

import os
import platform
import sys
import sysconfig
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

# No contraction: where multiply-adds are fused must not depend on the compiler.
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
if platform.machine() in ("x86_64", "AMD64"):
    # After CFLAGS: their -march must not leak into the ISA files. No MMX: GCC 12 uses it for small moves,
    # and then the thread's x87 arithmetic (NumPy's longdouble) gives NaN.
    compile_args += ["-march=x86-64", "-mno-mmx"]
link_args: list[str] = []
if sys.platform == "darwin":
    # Apple's clang has no OpenMP.
    pass
else:
    compile_args.append("-fopenmp")
    link_args.append("-fopenmp")
if os.environ.get("SELFATTN_WERROR"):
    compile_args.append("-Werror")
if sanitizers := os.environ.get("SELFATTN_SANITIZE"):
    # Fewer inlined kernels, or one file compiles for ten minutes (csrc/simd/common.h).
    compile_args += [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    compile_args += ["-g1", "-O1", "-DSA_PARTS_APART"]
    link_args.append(f"-fsanitize={sanitizers}")

# One extension for every CPython from 3.11 on, but for free-threaded ones, which have no stable ABI.
stable_abi = not sysconfig.get_config_var("Py_GIL_DISABLED")

headers = glob("csrc/**/*.h", recursive=True)
# What compiles longest comes first.
folders = ("isa", "kernels/*", "drivers", "runtime", "python")
sources = [path for folder in folders for path in sorted(glob(f"csrc/{folder}/*.c"))]


class BuildExt(build_ext):
    """Compiles files side by side, and leaves the built extension beside the sources too: Python started in a checkout
    imports the package from there."""

    def build_extensions(self) -> None:
        compile_files = self.compiler.compile

        def compile_side_by_side(files: list[str], **options: object) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = pool.map(lambda file: compile_files([file], **options), files)
                return [path for paths in objects for path in paths]

        self.compiler.compile = compile_side_by_side
        super().build_extensions()

    def run(self) -> None:
        super().run()
        if not self.inplace:
            self.copy_extensions_to_source()
        if stable_abi:
            # An older build for this Python alone would be imported before it.
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

"""Which C files are compiled, and with which flags; what is said when they cannot be. Metadata and tools are in
pyproject.toml."""

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path
from typing import Any

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

if sys.platform == "win32":
    raise SystemExit(
        "selfattn needs GCC 12 or later, or Clang; MSVC is not supported (see docs/guide/semantics.md). Wheels for "
        "Windows are made on Linux: tools/build_wheels.py --windows."
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
platform = sysconfig.get_platform()
windows = platform.startswith("win")
if platform.endswith(("x86_64", "amd64")):
    # These follow CFLAGS, whose -march must not leak into the ISA files. No MMX: GCC 12 uses it for small moves,
    # and then the thread's x87 arithmetic (NumPy's longdouble) gives NaN.
    compile_args += ["-march=x86-64", "-mno-mmx"]
compile_args.append("-pthread")
link_args = ["-pthread"]
if windows:  # csrc/Makefile says why
    compile_args += ["-Wa,-muse-unaligned-vector-move", "-D__USE_MINGW_ANSI_STDIO=1", "-Wno-format"]
    compile_args.append("-Wno-format-extra-args")
    link_args += ["-static", "-lpython3"]  # all but Python and Windows is linked in
elif sys.platform != "darwin":
    # OpenMP's functions are bound together at import: else some could come from one library, others from a later
    # imported PyTorch.
    link_args += ["-Wl,-z,now", "-ldl"]
if os.environ.get("SELFATTN_WERROR"):
    compile_args.append("-Werror")
if sanitizers := os.environ.get("SELFATTN_SANITIZE"):
    compile_args += [
        f"-fsanitize={sanitizers}",
        "-fno-sanitize-recover=all",
        "-fno-omit-frame-pointer",
        "-g1",
    ]
    link_args.append(f"-fsanitize={sanitizers}")
if sanitizers or os.environ.get("SELFATTN_QUICK_BUILD"):
    # Fewer inlined kernels, which compile in a tenth of the time, with sanitizers of ten minutes, and run slower
    # (csrc/simd/macros.h).
    compile_args += ["-O1", "-DSA_PARTS_APART"]

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
folders = ("isa", "kernels/*", "drivers", "runtime", "python", ".")
sources = [path for folder in folders for path in sorted(glob(os.path.normpath(f"csrc/{folder}/*.c")))]

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


# Variables that change what a compiler does.
VARIABLES = (
    "CPATH",
    "C_INCLUDE_PATH",
    "COMPILER_PATH",
    "GCC_EXEC_PREFIX",
    "MACOSX_DEPLOYMENT_TARGET",
    "SDKROOT",
)


class Objects:
    """Compiles a file unless its object of an earlier build has the same command and was made of the same bytes.

    A record next to the object has hashes of the command, of every file that the compiler read, and of the object. It
    is removed before the compiler begins and written after it has ended. Times do not count, nor does where NumPy is:
    pip puts it in another folder for each build.
    """

    def __init__(self, compiler: Any, version: str) -> None:
        self.compile_files = compiler.compile
        self.compiler = compiler
        self.version = version
        self.hashes: dict[str, str] = {}
        # Before the compiler reads them: what is edited meanwhile is compiled again in the next build.
        for path in [*sources, *headers]:
            self.hash(path)

    def hash(self, path: str) -> str:
        """Return the hash of a file's bytes when it was first asked for; "" if the file cannot be read."""
        if path not in self.hashes:
            try:
                content = Path(path.replace("NUMPY", numpy.get_include(), 1)).read_bytes()
                self.hashes[path] = hashlib.sha256(content).hexdigest()
            except OSError:
                self.hashes[path] = ""
        return self.hashes[path]

    def made_of(self, files: list[str], command: str, made: Path) -> dict[str, Any]:
        """Return a record, as it is if the object is made of these files as they are now."""
        names = {os.path.basename(path) for path in files}
        return {
            "command": command,
            "files": {path: self.hash(path) for path in files},
            # A new one could be found before the one that was read.
            "headers of these names": [path for path in sorted(headers) if os.path.basename(path) in names],
            "object": hashlib.sha256(made.read_bytes()).hexdigest(),
        }

    def compile(self, file: str, **options: Any) -> str:
        """Return the path of a file's object."""
        made = Path(self.compiler.object_filenames([file], output_dir=options["output_dir"])[0])
        record, read = made.with_suffix(".json"), made.with_suffix(".d")
        options.pop("depends")  # all headers
        settings = [self.compiler.compiler_so, self.compiler.include_dirs, options, self.version]
        settings += [os.environ.get(name) for name in VARIABLES]
        command = repr(settings).replace(numpy.get_include(), "NUMPY")
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            before = json.loads(record.read_text(encoding="utf-8"))
            if before == self.made_of(list(before["files"]), command, made):
                return str(made)
        record.unlink(missing_ok=True)
        options["extra_postargs"] = [*(options["extra_postargs"] or []), "-MD", "-MF", str(read)]
        self.compile_files([file], **options)
        words = shlex.split(read.read_text(encoding="utf-8").replace("\\\n", " ").partition(": ")[2])
        after = self.made_of([word.replace(numpy.get_include(), "NUMPY") for word in words], command, made)
        if all(after["files"].values()):
            written = made.with_suffix(".new")
            written.write_text(json.dumps(after, indent=1), encoding="utf-8")
            written.replace(record)
        return str(made)


@contextlib.contextmanager
def alone(folder: str) -> Iterator[None]:
    """Wait until no other build uses a folder of objects."""
    import fcntl  # which Windows lacks

    Path(folder).mkdir(parents=True, exist_ok=True)
    with open(Path(folder, "lock"), "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class BuildExt(build_ext):
    """Compiles what has changed, files at the same time, and copies the built extension next to the sources: Python
    started in a checkout imports the package from there."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.force = True  # to link: Objects knows what to compile
        if windows:
            self.library_dirs.clear()  # libraries of this system
        if self.editable_mode:  # pip's folder for objects goes after each build
            tag = sys.implementation.cache_tag + ("t" if sysconfig.get_config_var("Py_GIL_DISABLED") else "")
            self.build_temp = f"build/temp.{self.plat_name}-{tag}"

    def get_ext_filename(self, fullname: str) -> str:
        if windows:
            return os.path.join(*fullname.split(".")) + ".pyd"
        return super().get_ext_filename(fullname)

    def build_extensions(self) -> None:
        version = self.say_what_is_missing()
        self.use_openmp()
        objects = Objects(self.compiler, version)

        def compile_side_by_side(files: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                return list(pool.map(lambda file: objects.compile(file, **options), files))

        self.compiler.compile = compile_side_by_side
        with alone(self.build_temp):
            super().build_extensions()

    def say_what_is_missing(self) -> str:
        """Return the compiler's version. End with one line, in place of the compiler's many, if something that a build
        needs is not there."""
        command = list(self.compiler.compiler_so)
        known = {"compiler": shlex.join(command[:1]), "python": sysconfig.get_python_version(), "version": ""}
        try:
            done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
        except OSError:
            raise SystemExit(
                f"selfattn cannot be built: there is no C compiler '{known['compiler']}'. Install GCC 12 or Clang 14, "
                "or later (Debian: gcc), or name yours: CC=…"
            ) from None
        known["version"] = done.stdout.partition("\n")[0]
        include = [f"-I{path}" for path in [*self.compiler.include_dirs, *self.include_dirs]]
        include += [f"-D{name}={value}" for name, value in self.extensions[0].define_macros]
        with tempfile.TemporaryDirectory() as directory:
            source = Path(directory, "needs.c")
            for text, message in NEEDS:
                source.write_text(text + "int main(void) { return 0; }\n", encoding="ascii")
                check = [*command, *compile_args, *include, str(source), "-fsyntax-only"]
                if subprocess.run(check, capture_output=True, check=False).returncode != 0:
                    raise SystemExit(f"selfattn cannot be built: {message.format(**known)}.")
        return done.stdout

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


WASM = Path("selfattn/views/data/selfattn.wasm")  # what live pages load: the core in WebAssembly
CLANG = os.environ.get("CLANG", "clang-14")  # as in csrc/Makefile


def lacking_for_wasm() -> str:
    """Return what is missing to build for WebAssembly, and the Debian packages that bring it; "" if all is there."""
    for program in ("make", CLANG):
        if shutil.which(program) is None:
            return f"there is no {program} (Debian: make, clang-14, lld-14, wasi-libc, libclang-rt-14-dev-wasm32)"
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "wasm.c")
        source.write_text("#include <stdlib.h>\nint main(void) { return abs(-1); }\n", encoding="ascii")
        link = [CLANG, "--target=wasm32-wasi", str(source), "-o", str(source.with_suffix(".wasm"))]
        if subprocess.run(link, capture_output=True, check=False).returncode == 0:
            return ""
    return f"{CLANG} links no WebAssembly (Debian: lld-14, wasi-libc, libclang-rt-14-dev-wasm32)"


def make_wasm() -> None:
    """Write the core in WebAssembly into the package, or print one line. A file that somebody else has built, as that
    of an sdist or of a release's job, stays unless this is a checkout, whose sources may be newer, and Clang can."""
    if WASM.exists() and not Path(".git").exists():
        return
    lacking = lacking_for_wasm()
    if lacking and not WASM.exists():
        print(f"selfattn is built without live pages: {lacking}", file=sys.stderr)
    if lacking:
        return
    with alone("csrc/build"):
        make = f"make -s -j{os.cpu_count()} -C csrc wasm-library BUILD=build".split()
        if subprocess.run([*make, f"CLANG={CLANG}"], check=False).returncode != 0:
            raise SystemExit("selfattn cannot be built: the core in WebAssembly does not compile.")
        written = WASM.with_suffix(".new")
        shutil.copyfile("csrc/build/selfattn.wasm", written)
        written.replace(WASM)  # others may read it meanwhile


class BuildPy(build_py):
    """Takes the core in WebAssembly as a file of the package."""

    def run(self) -> None:
        make_wasm()
        super().run()


class Sdist(sdist):
    """As BuildPy: where an sdist is built, there may be no Clang for WebAssembly."""

    def run(self) -> None:
        make_wasm()
        super().run()


setup(
    cmdclass={"build_ext": BuildExt, "build_py": BuildPy, "sdist": Sdist},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if stable_abi else {},
    ext_modules=[
        Extension(
            "selfattn._core",
            sources=sources,
            depends=[*headers, "csrc/wasm/api.c", "csrc/Makefile"],  # also what an sdist has
            include_dirs=["csrc", numpy.get_include()],
            extra_compile_args=compile_args,
            extra_link_args=link_args,
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if stable_abi else [],
            py_limited_api=stable_abi,
        )
    ],
)

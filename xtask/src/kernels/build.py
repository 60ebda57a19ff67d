"""Compiles CUDA C++ with NVRTC, found in the running Python's site-packages.

build.py SOURCES OUT HOPPER [NAME...]: every SOURCES/*.cu, or those of these names, which may include others,
becomes OUT/*.ptx for compute capability 8.0 and later, and OUT/*.cubin for Hopper, beside whose copy in HOPPER
lies its PTX. Fails if a kernel needs more registers than there are.
"""

import concurrent.futures
import ctypes
import itertools
import pathlib
import re
import sys
import sysconfig


def library():
    folder = pathlib.Path(sysconfig.get_paths()["purelib"]) / "nvidia/cuda_nvrtc/lib"
    # The compiler looks for its builtins by name: they have to be there already.
    ctypes.CDLL(str(next(folder.glob("libnvrtc-builtins.so*"))), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(next(folder.glob("libnvrtc.so*"))))


def read(nvrtc, program, what):
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    data = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, data)
    return data.raw


def compile_one(nvrtc, source, headers, options):
    program = ctypes.c_void_p()
    texts = (ctypes.c_char_p * len(headers))(*[h.read_bytes() for h in headers])
    names = (ctypes.c_char_p * len(headers))(*[h.name.encode() for h in headers])
    created = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.read_bytes(), source.name.encode(), len(headers), texts, names
    )
    # Without contraction, so that a sum has the same bits in every kernel.
    options = [option.encode() for option in [*options, "-fmad=false"]]
    arguments = (ctypes.c_char_p * len(options))(*options)
    failed = created or nvrtc.nvrtcCompileProgram(program, len(options), arguments)
    log = read(nvrtc, program, "ProgramLog").rstrip(b"\0").decode()
    if failed:
        sys.exit(f"{source.name}: {log}")
    return program, log


def build(source, headers, out, hopper):
    nvrtc = library()
    program, _ = compile_one(nvrtc, source, headers, ["-arch=compute_80"])
    ptx = read(nvrtc, program, "PTX").rstrip(b"\0")
    (out / source.with_suffix(".ptx").name).write_bytes(ptx)
    options = ["-arch=sm_90a", "--ptxas-options=-v"]
    program, log = compile_one(nvrtc, source, headers, options)
    cubin, ptx = read(nvrtc, program, "CUBIN"), read(nvrtc, program, "PTX").rstrip(b"\0")
    (out / source.with_suffix(".cubin").name).write_bytes(cubin)
    (hopper / source.with_suffix(".cubin").name).write_bytes(cubin)
    (hopper / source.with_suffix(".ptx").name).write_bytes(ptx)
    kernels = re.findall(r"entry function '(\w+)'", log)
    # Of kernels, and of functions that are not part of one.
    functions = re.findall(r"properties for (\w+)\s.*?(\d+) bytes spill stores, (\d+)", log, re.S)
    spilled = [name for name, stores, loads in functions if stores != "0" or loads != "0"]
    if spilled or not kernels or len(functions) < len(kernels):
        sys.exit(f"{source.name}: registers are spilled in {', '.join(spilled) or 'all'}")
    return f"{source.name}: {len(kernels)} kernels"


def size_with_kernels(source):
    text = source.read_text()
    included = re.findall(r'#include "(\w+\.cu)"', text)
    return len(text) + sum((source.parent / name).stat().st_size for name in included)


def main():
    folder, out, hopper = map(pathlib.Path, sys.argv[1:4])
    names = sys.argv[4:]
    sources = [source for source in folder.glob("*.cu") if not names or source.stem in names]
    # The largest first, with the kernels that they include, so that all cores have work until the end.
    sources.sort(key=size_with_kernels, reverse=True)
    # A program takes one core.
    with concurrent.futures.ProcessPoolExecutor() as pool:
        common = map(itertools.repeat, (sorted(folder.glob("*.cu*")), out, hopper))
        for line in pool.map(build, sources, *common):
            print(line, flush=True)


if __name__ == "__main__":
    main()

"""Quantises a model with llama.cpp's own quantiser, through its C interface.

Needs the Python package llama_cpp_python, whose bindings are used without its high-level layer.
LLAMA_CPP_LIB_PATH may name a folder with other builds of the libraries.
"""

import argparse
import ctypes
import importlib.util
import os
import sys
import types


def bindings():
    """The module of C bindings, without the package's own imports."""
    folder = importlib.util.find_spec("llama_cpp").submodule_search_locations[0]
    package = types.ModuleType("llama_cpp")
    package.__path__ = [folder]
    sys.modules["llama_cpp"] = package
    import llama_cpp.llama_cpp as c

    return c, folder


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("input")
    parser.add_argument("output")
    parser.add_argument("type", help="as llama.cpp names it, such as Q4_K_M")
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()

    c, folder = bindings()
    quiet = c.llama_log_callback(lambda level, text, data: None)
    c.llama_log_set(quiet, None)
    libraries = os.environ.get("LLAMA_CPP_LIB_PATH", os.path.join(folder, "lib"))
    # Builds with several processor variants keep them in libraries of their own.
    ggml = ctypes.CDLL(os.path.join(libraries, "libggml.so"))
    ggml.ggml_backend_load_all_from_path.argtypes = [ctypes.c_char_p]
    ggml.ggml_backend_load_all_from_path(libraries.encode())
    c.llama_backend_init()

    params = c.llama_model_quantize_default_params()
    params.nthread = args.threads
    prefix = "LLAMA_FTYPE_ALL_" if args.type == "F32" else "LLAMA_FTYPE_MOSTLY_"
    # The bindings may not know the newest types.
    params.ftype = {"MXFP4_MOE": 38}.get(args.type) or getattr(c, prefix + args.type)
    failed = c.llama_model_quantize(
        args.input.encode(), args.output.encode(), ctypes.byref(params)
    )
    if failed:
        sys.exit(f"llama.cpp cannot make {args.type} of {args.input}")


main()

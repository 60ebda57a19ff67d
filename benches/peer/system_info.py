"""Prints the instruction sets that a build of llama.cpp or of a fork of it uses, as it names them.

The argument is the folder of the build, where libllama.so and libggml.so lie at any depth.
"""

import ctypes
import glob
import os
import sys


def library(name):
    paths = glob.glob(os.path.join(sys.argv[1], "**", name), recursive=True)
    if not paths:
        sys.exit(f"{sys.argv[1]}: expected {name}, found none")
    return ctypes.CDLL(paths[0], mode=ctypes.RTLD_GLOBAL), os.path.dirname(paths[0])


ggml, folder = library("libggml.so")
if hasattr(ggml, "ggml_backend_load_all_from_path"):
    # Builds with several processor variants keep them in libraries of their own.
    ggml.ggml_backend_load_all_from_path.argtypes = [ctypes.c_char_p]
    ggml.ggml_backend_load_all_from_path(folder.encode())
llama, _ = library("libllama.so")
llama.llama_print_system_info.restype = ctypes.c_char_p
print(llama.llama_print_system_info().decode())

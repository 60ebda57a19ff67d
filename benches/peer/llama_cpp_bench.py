"""Measures llama.cpp through its C interface, in the way that `bodkin bench` measures bodkin.

Needs the Python package llama_cpp_python, whose bindings are used without its high-level layer.
LLAMA_CPP_LIB_PATH may name a folder with other builds of the libraries. Prints one JSON object:
the seconds of each run, after one run that does not count.
"""

import argparse
import ctypes
import importlib.util
import json
import os
import sys
import time
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
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--prompt", type=int, default=0)
    parser.add_argument("--generate", type=int, default=0)
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--runs", type=int, default=1)
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

    model = c.llama_model_load_from_file(args.model.encode(), c.llama_model_default_params())
    if not model:
        sys.exit(f"llama.cpp cannot load {args.model}")
    params = c.llama_context_default_params()
    params.n_ctx = args.depth + args.prompt + args.generate + 32
    params.n_batch, params.n_ubatch = 2048, 512
    params.n_threads = params.n_threads_batch = args.threads
    context = c.llama_init_from_model(model, params)
    vocabulary = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))

    def feed(count, step):
        state = 1
        while count > 0:
            n = min(count, step)
            tokens = (c.llama_token * n)()
            for i in range(n):
                state = (state * 1664525 + 1013904223) % 2**32
                tokens[i] = (state >> 8) % vocabulary
            if c.llama_decode(context, c.llama_batch_get_one(tokens, n)) != 0:
                sys.exit("llama.cpp failed to decode")
            count -= n

    seconds = []
    for run in range(args.runs + 1):
        c.llama_memory_clear(c.llama_get_memory(context), True)
        feed(args.depth, 2048)
        c.llama_synchronize(context)
        start = time.perf_counter()
        feed(args.prompt, 2048)
        feed(args.generate, 1)
        c.llama_synchronize(context)
        if run > 0:
            seconds.append(time.perf_counter() - start)
    print(json.dumps({"seconds": seconds, "system": c.llama_print_system_info().decode()}))


main()

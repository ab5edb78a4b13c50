"""On the path of a process: vLLM's model runner V2, which alone gives routes, computes on a CPU.

It needs Triton, and vLLM for CPUs takes Triton only with a backend for CPUs, which no published wheel has. Triton's
interpreter computes the few kernels of that runner with numpy instead.
"""

import os
import types

os.environ["TRITON_INTERPRET"] = "1"

import triton.backends


class Interpreter:
    @staticmethod
    def is_active():
        return True


triton.backends.backends["cpu"] = types.SimpleNamespace(driver=Interpreter, compiler=None)

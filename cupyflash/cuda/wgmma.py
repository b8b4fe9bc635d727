"""Text of the wgmma wrappers: one C++ function around one instruction, for the shapes that a config needs."""

from __future__ import annotations

_TYPES = {"float16": "f16", "bfloat16": "bf16"}


def wrapper(name: str, dtype: str, columns: int, *, a_in_registers: bool) -> str:
    """A function ``name(d, a, b, accumulate)`` that starts the 64 x columns x 16 product d = [d +] a b.

    Parameters
    ----------
    name : str
        Name of the C++ function.
    dtype : str
        float16 or bfloat16: element type of a and b. d is float32 in registers.
    columns : int
        Columns of b and d, a multiple of 8 up to 256.
    a_in_registers : bool
        a is four registers of pairs and b is stored by rows of its 16-deep axis; otherwise both are descriptors
        of tiles whose rows run along that axis.
    """
    count = columns // 2
    accumulators = ", ".join(f"%{n}" for n in range(count))
    a_count = 4 if a_in_registers else 1
    a = ", ".join(f"%{count + n}" for n in range(a_count))
    a = f"{{{a}}}" if a_in_registers else a
    b, flag = count + a_count, count + a_count + 1
    transposed = "1" if a_in_registers else "0, 0"
    kind = _TYPES[dtype]
    outputs = ", ".join(f'"+f"(d[{n}])' for n in range(count))
    inputs = ", ".join(f'"r"(a[{n}])' for n in range(4)) if a_in_registers else '"l"(a)'
    parameter = "const unsigned* a" if a_in_registers else "unsigned long long a"
    return (
        f"__device__ __forceinline__ void {name}(float (&d)[{count}], {parameter}, unsigned long long b,"
        f" int accumulate) {{\n"
        f'  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{flag}, 0; '
        f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} "
        f'{{{accumulators}}}, {a}, %{b}, p, 1, 1, {transposed}; }}"\n'
        f'               : {outputs}\n               : {inputs}, "l"(b), "r"(accumulate));\n}}\n'
    )

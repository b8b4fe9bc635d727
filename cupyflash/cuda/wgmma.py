"""Text of the wgmma wrappers: one C++ function around one instruction, for the shapes that a config needs."""

from __future__ import annotations

_TYPES = {"float16": "f16", "bfloat16": "bf16"}
# What stands for the instruction on a CPU: kernels_cu/core/emulate/ptx_sm90.cuh.
_EMULATED = """namespace emulate {
template <class T, bool a_by_rows, bool b_by_rows, int count, class A>
void wgmma(float (&d)[count], A a, unsigned long long b, bool accumulate);
}
"""


def wrapper(
    name: str,
    dtype: str,
    columns: int,
    *,
    a_in_registers: bool = False,
    a_by_rows: bool = False,
    b_by_rows: bool = False,
    first: bool = False,
) -> str:
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
        a is four registers of pairs; otherwise a descriptor, as b always is.
    a_by_rows, b_by_rows : bool
        A descriptor's tile is stored by rows of the 16-deep axis; otherwise its rows run along that axis.
    first : bool
        The function is ``name(d, a, b)`` and computes d = a b, so that the compiler does not keep what d was.
    """
    count = columns // 2
    accumulators = ", ".join(f"%{n}" for n in range(count))
    a_count = 4 if a_in_registers else 1
    a = ", ".join(f"%{count + n}" for n in range(a_count))
    a = f"{{{a}}}" if a_in_registers else a
    b = count + a_count
    flag = "0" if first else f"%{b + 1}"
    transposed = f"{b_by_rows:d}" if a_in_registers else f"{a_by_rows:d}, {b_by_rows:d}"
    scale = "" if first else ', "r"(accumulate)'
    kind = _TYPES[dtype]
    outputs = ", ".join(f'"{"=" if first else "+"}f"(d[{n}])' for n in range(count))
    inputs = ", ".join(f'"r"(a[{n}])' for n in range(4)) if a_in_registers else '"l"(a)'
    parameter = "const unsigned* a" if a_in_registers else "unsigned long long a"
    flags = "" if first else ", int accumulate"
    signature = f"void {name}(float (&d)[{count}], {parameter}, unsigned long long b{flags})"
    kinds = f"{dtype}, {a_by_rows:d}, {b_by_rows:d}"
    return (
        f"#ifdef CUPYFLASH_EMULATE\n{_EMULATED}"
        f"inline {signature} {{ emulate::wgmma<{kinds}>(d, a, b, {'false' if first else 'accumulate'}); }}\n"
        f"#else\n__device__ __forceinline__ {signature} {{\n"
        f'  asm volatile("{{ .reg .pred p; setp.ne.b32 p, {flag}, 0; '
        f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} "
        f'{{{accumulators}}}, {a}, %{b}, p, 1, 1, {transposed}; }}"\n'
        f'               : {outputs}\n               : {inputs}, "l"(b){scale});\n}}\n#endif\n'
    )
